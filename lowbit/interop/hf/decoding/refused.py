"""The error for what `lowbit.hf.generate` does not do."""

from __future__ import annotations


def refused(what: str, why: str) -> ValueError:
    """A ValueError that names the option and the way out."""
    return ValueError(
        f"lowbit.hf.generate does not take {what}: {why}; leave it out, or call model.generate(...) without "
        "custom_generate, which is transformers' own loop"
    )
