"""Rewrites a module for Python 3.9: what newer versions only write shorter, and what they check in addition.

`slots=True` of data classes and `strict=True` of `zip` are left out. A union written `A | B` becomes `Union[A, B]`, or
a tuple in `isinstance`. What newer standard libraries have has a stand-in.
Comments and docstrings of functions are not in the result.
"""

from __future__ import annotations

import ast

SINCE_3_10 = {
    "typing": {
        name: f"from typing import Any as {name}"
        for name in ("TypeAlias", "TypeGuard", "ParamSpec", "Concatenate", "Self", "Never", "override")
    },
    "types": {"NoneType": "NoneType = type(None)", "UnionType": "from typing import Union as UnionType"},
    "itertools": {"pairwise": "def pairwise(items):\n    items = list(items)\n    return zip(items, items[1:])"},
}


def rewrite(source: str, name: str) -> str:
    """Return the module for Python 3.9.

    Raises:
        ValueError: it has a `match` statement that asks for more than classes and None.
    """
    tree = ast.parse(source, name)
    tree = ast.fix_missing_locations(_Older().visit(tree))
    text = ast.unparse(tree)
    ast.parse(text, name, feature_version=(3, 9))
    return text + "\n"


class _Older(ast.NodeTransformer):
    """Annotations of functions stay text, because nothing looks at them; those of classes are rewritten."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called in ("dataclass", "dataclasses.dataclass"):
            node.keywords = [each for each in node.keywords if each.arg not in ("slots", "kw_only")]
        elif called == "zip":
            node.keywords = [each for each in node.keywords if each.arg != "strict"]
        elif called in ("isinstance", "issubclass") and len(node.args) == 2 and _is_union(node.args[1]):
            node.args[1] = ast.Tuple(_members(node.args[1]), ast.Load())
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if ast.unparse(node.annotation) in ("TypeAlias", "t.TypeAlias", "te.TypeAlias") and node.value is not None:
            return ast.copy_location(ast.Assign([node.target], _as_union(node.value)), node)
        node.annotation = _as_union(node.annotation)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Subscript) or _is_of_classes(node.value):  # a name for a type
            node.value = _as_union(node.value)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [_as_union(each) if isinstance(each, ast.Subscript) else each for each in node.bases]
        self.generic_visit(node)
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        found: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _test_of(node.subject, case.pattern)
            found = [ast.If(test, case.body, found)] if test is not None else case.body
        return found[0]

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                each.annotation = None
        if len(node.body) > 1 and ast.get_docstring(node) is not None and not node.decorator_list:
            node.body = node.body[1:]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        stand_ins = SINCE_3_10.get(node.module or "", {})
        added = [ast.parse(stand_ins[each.name]).body[0] for each in node.names if each.name in stand_ins]
        node.names = [each for each in node.names if each.name not in stand_ins]
        return [*([node] if node.names else []), *added]  # type: ignore[return-value]


def _test_of(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    """Return the test of a case; None for the case of all others."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return None
    if isinstance(pattern, ast.MatchSingleton):
        return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
    if isinstance(pattern, ast.MatchClass) and not (pattern.patterns or pattern.kwd_patterns):
        return ast.Call(ast.Name("isinstance", ast.Load()), [subject, pattern.cls], [])
    if isinstance(pattern, ast.MatchOr):
        tests = [test for each in pattern.patterns if (test := _test_of(subject, each)) is not None]
        return ast.BoolOp(ast.Or(), tests)
    raise ValueError(f"case {ast.unparse(pattern)}: cannot be written for Python 3.9")


def _is_union(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _is_of_classes(node: ast.expr) -> bool:
    """Whether this is a union of names that are written as those of classes are, or of built-in types."""
    members = [each.value if isinstance(each, ast.Subscript) else each for each in _members(node)]
    names = [each.id if isinstance(each, ast.Name) else ast.unparse(each) for each in members]
    return len(names) > 1 and all(
        name in ("str", "int", "float", "bool", "bytes", "None") or (name[:1].isupper() and not name.isupper())
        for name in names
    )


def _members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and _is_union(node):
        return [*_members(node.left), *_members(node.right)]
    return [node]


class _Unions(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.BitOr):
            return node
        union = ast.parse("__import__('typing').Union", mode="eval").body
        return ast.Subscript(union, ast.Tuple(_members(node), ast.Load()), ast.Load())


def _as_union(node: ast.expr) -> ast.expr:
    found = _Unions().visit(node)
    assert isinstance(found, ast.expr)
    return found
