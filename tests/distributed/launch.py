"""The launcher of `lowbit.testing`, under the name by which lowbit's own tests import it."""

from lowbit.testing.launch import ChildError, launch

__all__ = ["ChildError", "launch"]
