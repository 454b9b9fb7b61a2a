"""The script's own functions and classes, and the variables that functions name."""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from instep.process import is_script_file
from instep.process.patching import ignored_warnings

_AROUND_FUNCTIONS = (
    *(staticmethod, classmethod, property),
    *(functools.cached_property, functools.partialmethod, functools.singledispatchmethod),
)
_INSIDE = ("__func__", "fget", "fset", "fdel", "func")
"""The attributes in which these keep their functions."""
_BY_TEXT = frozenset(
    ["globals", "vars", "getattr", "setattr", "modules", "import_module", "__dict__", "__globals__"]
)
"""The names of what finds a variable, an attribute or a module by a text."""
_VARIABLES_BY_TEXT = _BY_TEXT - {"getattr", "setattr"}
_OPERATIONS = ("_GLOBAL", "_GLOBALS", "_NAME")
"""How operations end that read or set a global variable."""
_STORE_ATTR, _STORE_SUBSCR = dis.opmap["STORE_ATTR"], dis.opmap["STORE_SUBSCR"]
ANY_NAME = "*"
"""The name that is given to `setattr` as a variable."""
OWN_OBJECT = ("self", "cls")
"""What methods call the object and the class of theirs."""


def is_of_script(value: Any) -> bool:
    """Whether a function, class or module is the script's own and not a library's."""
    if isinstance(value, type):
        space: Mapping[str, Any] = getattr(sys.modules.get(value.__module__), "__dict__", {})
    else:
        space = vars(value) if isinstance(value, types.ModuleType) else value.__globals__
    file = space.get("__file__")
    if file is None:  # of `exec` without a namespace of that name
        return bool(space.get("__name__", "__main__") == "__main__")
    return is_script_file(str(file))


def is_made(value: object) -> bool:
    """Whether this is a module that was imported from nowhere: `types.ModuleType("options")`."""
    if not isinstance(value, types.ModuleType):
        return False
    return all(vars(value).get(name) is None for name in ("__file__", "__spec__"))


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a class defines itself, those of its properties among them."""
    for each in list(vars(cls).values()):
        yield from functions_in(each)


def functions_in(value: object) -> list[types.FunctionType]:
    """The functions of an attribute of a class: itself, or those of a property, for example."""
    inside = [value]
    if isinstance(value, _AROUND_FUNCTIONS):
        inside = [getattr(value, name, None) for name in _INSIDE]
    return [function for function in inside if isinstance(function, types.FunctionType)]


def named_spaces(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where global variables are that a function may name: its own module, and those of the
    script's modules that it names, after the beginning of a path."""
    yield "", function.__globals__
    for name, module in named_modules(function):
        if is_of_script(module) or is_made(module):
            yield f"{name}.", vars(module)


def named_modules(function: types.FunctionType) -> Iterator[tuple[str, types.ModuleType]]:
    """The modules that a function names, with the names: global variables, what is imported inside
    of it, and the modules in those."""
    names = names_in(function.__code__)
    found: set[int] = set()
    waiting = [(name, function.__globals__.get(name, sys.modules.get(name))) for name in names]
    for name, value in waiting:
        if isinstance(value, types.ModuleType) and id(value) not in found:
            found.add(id(value))
            yield name, value
            waiting += [(inside, vars(value).get(inside)) for inside in names]


def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of global variables and attributes in a function and in those inside of it; texts,
    too, where it may name something by them."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    texts: list[str] = []
    if not _BY_TEXT.isdisjoint(code.co_names):
        texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    others = (name for names in inside for name in names)
    return tuple(dict.fromkeys([*code.co_names, *texts, *others]))


@functools.cache
def global_names_in(code: types.CodeType) -> tuple[str, ...]:
    """Those of `names_in` that may name a global variable."""
    if not _VARIABLES_BY_TEXT.isdisjoint(names_in(code)):
        return names_in(code)
    inside = (global_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    operations = dis.get_instructions(code)
    found = (each.argval for each in operations if each.opname.endswith(_OPERATIONS))
    return tuple(dict.fromkeys([*found, *(name for names in inside for name in names)]))


def sets_values(function: types.FunctionType) -> bool:
    """Whether a function sets items, or the attributes by which an object of ctypes is set."""
    return _sets_values(function.__code__)


@functools.cache
def _sets_values(code: types.CodeType) -> bool:
    return any(
        each.opname in ("STORE_SUBSCR", "STORE_SLICE")
        or (each.opname == "STORE_ATTR" and each.argval in ("value", "raw"))
        for each in dis.get_instructions(code)
    ) or any(_sets_values(each) for each in code.co_consts if isinstance(each, types.CodeType))


def is_named_only_in(name: str, functions: tuple[str, ...]) -> bool:
    """Whether an attribute is named by these functions of the script's only, and by functions that
    they alone name; as a text, too, which `getattr` may get."""
    return _is_named_only_in(name, functions, len(sys.modules))


@functools.cache
def _is_named_only_in(name: str, functions: tuple[str, ...], modules: int) -> bool:
    """`modules`: how many there are, since one that is imported later may name it, too."""
    waiting = [name]
    known: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        users = {
            user
            for table in map(_names_by_function, script_files())
            for user, names in table
            if wanted in names
        }
        is_unknown = not users or any(
            user[0] == "<" or user[:2] == "__" for user in users - {*functions}
        )
        if is_unknown:
            return False
        waiting += users - known - {*functions}
        known |= users
    return True


def script_files() -> tuple[str, ...]:
    """The files of the script's modules."""
    return _script_files(len(sys.modules))


@functools.cache
def _script_files(modules: int) -> tuple[str, ...]:
    """`modules`: how many there are, since more of them may be the script's later."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    texts = dict.fromkeys(file for file in files if isinstance(file, str))
    return tuple(file for file in texts if file.endswith(".py") and is_script_file(file))


@functools.cache
def code_of(file: str) -> types.CodeType:
    """The code in a file of the script's; none if it is another file by now."""
    try:
        with ignored_warnings(""):  # the import has shown them
            return compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return compile("", file, "exec")


@functools.cache
def names_set_in(file: str) -> frozenset[str]:
    """What the code in a file may set as attributes, or as the items of a module's dict: a superset
    that is found without the syntax tree, which takes four times as long. Methods' `self.x = …` is
    left out."""
    return frozenset(_names_set(code_of(file)))


def _names_set(code: types.CodeType) -> set[str]:
    names: set[str] = set()
    for inside in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        names |= _names_set(inside)
    operations = code.co_code[::2]
    calls = "setattr" in code.co_names
    if calls or _STORE_ATTR in operations:
        is_method = "." in code.co_qualname and "<locals>" not in code.co_qualname
        before: object = None  # the name of the variable that was loaded last
        for each in dis.get_instructions(code):
            if each.opname == "STORE_ATTR" and not (is_method and before in OWN_OBJECT):
                names.add(each.argval)
            if each.argval == "setattr" and each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(ANY_NAME)
            loaded = each.argval if each.opname.startswith("LOAD_FAST") else None
            before = loaded[-1] if isinstance(loaded, tuple) else loaded
    if ANY_NAME in names or _STORE_SUBSCR in operations:
        names.update(each for each in code.co_consts if isinstance(each, str))
    return names


@functools.cache
def _names_by_function(file: str) -> list[tuple[str, set[str]]]:
    """The functions in a file, and the names and texts in each; bodies of classes are left out."""
    found: list[tuple[str, set[str]]] = []

    def look(code: types.CodeType, function: str) -> None:
        is_class = not code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "<module>"
        function = function if code.co_name[0] == "<" and function else code.co_name
        texts = {text for text in code.co_consts if isinstance(text, str)}
        if not is_class:
            found.append((function, {*code.co_names, *texts}))
        for inside in code.co_consts:
            if isinstance(inside, types.CodeType):
                look(inside, "" if is_class else function)

    look(code_of(file), "")
    return found
