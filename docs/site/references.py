"""Names of lowbit in backticks, such as `lowbit.optim.AdamW`, become links to their entries of the API reference.

A name without an entry, such as that of a private module, stays as it is.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

NAME = re.compile(r"<code>(lowbit(?:_kernels)?(?:\.\w+)+)(\(\))?</code>(?!</a>)")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the names in a page for the plugin autorefs, which makes the links."""
    return NAME.sub(r'<autoref identifier="\1" optional><code>\1\2</code></autoref>', html)
