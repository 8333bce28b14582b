"""Which layers have a feature, in Megatron's spelling: a number, or a list with a number for each layer."""

import ast


def read_layer_list(text: str) -> int | list[int]:
    """The value of `6`, `[1,1,0]` or `([1]*5+[0])*2`.

    Raises:
        ValueError: anything else than a number above 0, or a list of 0 and 1.
    """
    try:
        found = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        raise ValueError from None
    if isinstance(found, list) and set(found) <= {0, 1} and found:
        return found
    if isinstance(found, int) and found > 0:
        return found
    raise ValueError


def layer_list_text(text: str) -> str:
    """`text`, if `read_layer_list` reads it."""
    read_layer_list(text)
    return text


def chosen_layers(text: str | None, layers: int) -> list[int]:
    """1 for each layer that has the feature, 0 for the others: all but every N-th, those of a list, or all (None)."""
    found = read_layer_list(text) if text else [1] * layers
    return found if isinstance(found, list) else [int(number % found != 0) for number in range(1, layers + 1)]


def _value(node: ast.expr) -> int | list:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)  # type: ignore[operator]  # a number and a list: TypeError
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)  # type: ignore[operator]
    raise ValueError
