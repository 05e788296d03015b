"""lowbit's plug-in for Axolotl; `lowbit.interop.axolotl` describes and holds it."""

from lowbit.interop.axolotl import LowbitArgs, LowbitPlugin, LowbitSettings

__all__ = ["LowbitArgs", "LowbitPlugin", "LowbitSettings"]
