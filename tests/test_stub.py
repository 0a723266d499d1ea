"""The stub of the compiled module, which type checkers read in its place, says what is in it."""

import ast
import re
from pathlib import Path

import pytest
import warpsmith
from warpsmith import _C

STUB = ast.parse(Path(warpsmith.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
VALUES = {node.target.id: node for node in STUB.body if isinstance(node, ast.AnnAssign)}


def functions(body):
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def public(value):
    return {name for name in dir(value) if not name.startswith("_")}


def assert_same_arguments(stub, function):
    signature = function.__doc__.splitlines()[0]  # pybind11's
    arguments = [a.arg for a in stub.args.args]
    assert [name for name in arguments if name != "self"] == [
        name for name in re.findall(r"[(,] ?(\w+): ", signature) if name != "self"
    ]


def test_names_and_arguments_are_those_of_the_module():
    assert set(functions(STUB.body)) | set(CLASSES) | set(VALUES) == public(_C)
    for name, stub in functions(STUB.body).items():
        if stub.args.kwarg is None:
            assert_same_arguments(stub, getattr(_C, name))


@pytest.mark.parametrize("name", CLASSES)
def test_methods_and_their_arguments_are_those_of_the_class(name):
    found, stubs = getattr(_C, name), functions(CLASSES[name].body)
    assert set(stubs) - {"__init__"} == public(found)
    for method, stub in stubs.items():
        if stub.decorator_list:
            assert isinstance(getattr(found, method), property)
        else:
            assert_same_arguments(stub, getattr(found, method))
