"""The tools around lowbit, where they are installed (extra `test-integrations`); no model comes from a hub."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
