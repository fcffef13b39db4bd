"""Adapters to training frameworks, one module each: ``holdfast.integrations.transformers`` ….

Nothing else in the library imports a framework. See ``docs/integrations.md``.
"""

__all__: list[str] = []
