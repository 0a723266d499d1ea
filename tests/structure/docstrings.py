"""What the docstring of a public name must hold."""

import inspect
import re

# Of an op's function. "Formula": mathematics in backquotes or a math block.
OP_SECTIONS = {
    "formula": r"\.\. math::|``[^`]*=[^`]*``|:math:",
    "shapes": r"[Ss]hape|\(\.\.\.|of the shape",
    "dtypes": r"float32",
    "errors": r"Raises:",
    "determinism": r"[Dd]eterminis",
    "source": r"Source",
    "example": r">>>",
}
CLASS_SECTIONS = {"example": r">>>"}
FUNCTION_SECTIONS = {"example": r">>>"}


def missing_sections(name, value, is_op):
    """What the docstring of one public name lacks."""
    text = inspect.getdoc(value) or ""
    if not text:
        return [f"{name}: no docstring"]
    sections = OP_SECTIONS if is_op else CLASS_SECTIONS if inspect.isclass(value) else FUNCTION_SECTIONS
    return [
        f"{name}: docstring: {section} is missing"
        for section, pattern in sections.items()
        if not re.search(pattern, text)
    ]


def public_names(module):
    """(qualified name, value) of everything in a module's ``__all__`` that is a function or a class."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{module.__name__}.{name}", value


def undocumented(modules):
    """What the public names of modules lack. A function defined in ``warpsmith.ops`` is an op."""
    found = []
    for module in modules:
        for name, value in public_names(module):
            is_op = inspect.isfunction(value) and value.__module__.startswith("warpsmith.ops.")
            found += missing_sections(name, value, is_op)
    return found
