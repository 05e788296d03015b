"""The ``lowbit`` namespace of ``torch.ops``. Modules of ops define, implement and fake theirs in it."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
