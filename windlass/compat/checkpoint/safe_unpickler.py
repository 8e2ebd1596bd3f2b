"""Reader of pickles that executes no code and has a memory limit.

[Note: reading pickles] Python's own unpickler lets its caller restrict only the names that a pickle may use. A pickle
of a few bytes can still set any attribute of an object made by these names, or allocate gigabytes. This reader supports
opcodes of protocols 2 to 5. A name is resolved to an `AllowedFunction`, a stand-in class (`PickleStandIn`) or a plain
value, and only stand-ins get a state. Every object is charged to a `MemoryBudget` before or when it is made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from sys import getsizeof
from typing import Any

from windlass.checkpoint.key_validation import KeyValidator
from windlass.checkpoint.plain_data import MOST_DEPTH
from windlass.compat.checkpoint.pickle_stand_ins import PickleStandIn

_MOST_ARGUMENTS = 64
_LONGEST_INTEGER = 255  # bytes, at most 615 digits: Python's limit on digits in a conversion to text is at least 640
_WORD = 9  # bytes of a reference in a growing list
_BAG = 200
_VALUE = 64  # bytes charged for each reference to a value, because callers copy the values

_INT32, _INT16, _UINT32, _UINT64, _FLOAT = map(struct.Struct, ("<i", "<H", "<I", "<Q", ">d"))


class PickleError(ValueError):
    """Error for a pickle that is damaged or requests something that is not allowed."""


class MemoryBudget:
    """Limit on the total number of bytes that may be allocated."""

    def __init__(self, limit: int) -> None:
        self.limit, self._left = limit, limit

    def charge(self, nbytes: int) -> None:
        """Count `nbytes` bytes as allocated. Raises PickleError if fewer are left."""
        self._left -= nbytes
        if self._left < 0:
            raise PickleError(f"its plain data need more than {self.limit} bytes of memory, which no valid file needs")


class AllowedFunction:
    """Function that a pickle may call, with a budget and the pickle's arguments. A pickle cannot set its attributes."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class _StackMark:
    """Type of the mark that the opcode MARK pushes: later opcodes take all values above the mark."""


_MARK = _StackMark()


class SafeUnpickler:
    """Reader of one pickle; see [Note: reading pickles].

    Args:
        resolve_name: returns the object for a module and name: an `AllowedFunction`, a subclass of `PickleStandIn`, or
            a plain value.
        resolve_persistent: returns the object for a persistent ID of the pickle.
    """

    def __init__(
        self,
        text: bytes,
        budget: MemoryBudget,
        resolve_name: Callable[[str, str], Any],
        resolve_persistent: Callable[[Any], Any],
    ) -> None:
        self._text, self._at, self._budget = text, 0, budget
        self._resolve_name, self._resolve_persistent = resolve_name, resolve_persistent
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._sparse_memo: dict[int, Any] = {}  # memo entries that are not consecutive
        self._keys = KeyValidator()

    def load(self) -> Any:
        """Return the value that the pickle describes. It has bounded depth and no cycles.

        Raises:
            PickleError: the pickle is damaged, or requests something that is not allowed.
        """
        deepest = 0
        text, stack, budget = self._text, self._stack, self._budget
        while True:
            if self._at >= len(text):
                raise PickleError("it is truncated")
            code = text[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                break
            opcode = _OPCODES.get(code)
            if opcode is None:
                raise PickleError(f"it has the opcode {bytes([code])!r}, which is not read")
            try:
                opcode(self)
            except (IndexError, KeyError) as error:
                raise PickleError(f"it is damaged at byte {self._at} ({type(error).__name__})") from error
            except UnicodeDecodeError as error:
                raise PickleError(f"it is damaged at byte {self._at}: a string that is not UTF-8") from error
            if len(stack) > deepest:
                budget.charge((len(stack) - deepest) * _WORD)
                deepest = len(stack)
        if len(stack) != 1 or stack[0] is _MARK:
            raise PickleError("it does not end with one value")
        check_tree(stack[0], budget)
        return stack[0]

    # Arguments of opcodes.

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raise PickleError, before any memory is allocated, if fewer are left."""
        if count > len(self._text) - self._at:
            raise PickleError(f"it is truncated: {count} bytes are needed, {len(self._text) - self._at} are left")
        begin, self._at = self._at, self._at + count
        return self._text[begin : self._at]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._text.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise PickleError("it is truncated in a name")
        line, self._at = self._text[self._at : end].decode(), end + 1
        return line

    # Stack.

    def _push(self, value: Any, cost: int) -> None:
        self._budget.charge(cost)
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleError("it pops a value from an empty stack")
        return value

    def _top(self) -> Any:
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("it ends a list that was not begun")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    # Values.

    def text(self, form: struct.Struct) -> None:
        """Push a string. Its length precedes it in the pickle."""
        value = self._take(self._number(form)).decode("utf-8", "surrogatepass")
        self._push(value, getsizeof(value))

    def raw(self, form: struct.Struct) -> None:
        """Push bytes. Their length precedes them in the pickle."""
        value = self._take(self._number(form))
        self._push(value, getsizeof(value))

    def integer(self, form: struct.Struct) -> None:
        """Push an integer or a float of a fixed size."""
        self._push(self._number(form), 32)

    def large(self, form: struct.Struct) -> None:
        """Push an integer of up to 255 bytes. Its length in bytes precedes it in the pickle."""
        length = self._number(form)
        if not 0 <= length <= _LONGEST_INTEGER:
            raise PickleError(f"it has an integer of {length} bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True), 32 + length)

    def constant(self, value: Any) -> None:
        """Push None, True or False."""
        self._stack.append(value)

    def empty(self, make: Callable[[], Any]) -> None:
        """Push an empty list, dictionary, set or tuple."""
        value = make()
        self._push(value, getsizeof(value) if value != () else 0)

    def tuple_of(self, count: int | None) -> None:
        """Push the last `count` values as a tuple; None: all values since the mark."""
        items = self._pop_to_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self._push(tuple(items), 56 + 8 * len(items))

    def push_from_mark(self, kind: type[Any]) -> None:
        """Push the values since the mark as a list, dictionary or frozen set."""
        items = self._pop_to_mark()
        if kind is list:
            self._push(items, 56 + _WORD * len(items))
        elif kind is dict:
            self._push({}, 64)
            self._set_items(self._top(), items)
        else:
            for item in items:
                self._keys.require(item)
            found = frozenset(items)
            self._push(found, getsizeof(found))

    def append(self, *, several: bool) -> None:
        """Append the last value to a list, or with `several` all values since the mark."""
        items = self._pop_to_mark() if several else [self._pop()]
        target = self._top()
        if type(target) is not list:
            raise PickleError(f"it appends to a {type(target).__name__}")
        self._budget.charge(_WORD * len(items))
        target.extend(items)

    def add(self) -> None:
        """Add all values since the mark to a set."""
        items, target = self._pop_to_mark(), self._top()
        if type(target) is not set:
            raise PickleError(f"it adds to a {type(target).__name__}")
        before = getsizeof(target)
        for item in items:
            self._keys.require(item)
            target.add(item)
        self._budget.charge(getsizeof(target) - before)

    def set_item(self, *, several: bool) -> None:
        """Set a dictionary's item from the last two values; with `several`, from each pair of values since the mark."""
        items = self._pop_to_mark() if several else [self._pop(), self._pop()][::-1]
        self._set_items(self._top(), items)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        before = getsizeof(target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._keys.require(key)
            target[key] = value
        self._budget.charge(getsizeof(target) - before)

    def mark(self) -> None:
        """Push a mark."""
        self._stack.append(_MARK)

    def pop(self) -> None:
        """Drop the last value, or mark."""
        self._stack.pop()

    def pop_mark(self) -> None:
        """Drop all values since the mark."""
        self._pop_to_mark()

    def duplicate(self) -> None:
        """Push the last value again."""
        value = self._pop()
        self._stack += (value, value)

    # Memo.

    def put(self, form: struct.Struct | None) -> None:
        """Store the last value in the memo."""
        value = self._stack[-1]
        number = len(self._memo) if form is None else self._number(form)
        if number == len(self._memo) and not self._sparse_memo:
            self._budget.charge(_WORD)
            self._memo.append(value)
        elif number < len(self._memo):
            self._memo[number] = value
        else:
            self._budget.charge(128)
            self._sparse_memo[number] = value

    def get(self, form: struct.Struct) -> None:
        """Push a value from the memo."""
        number = self._number(form)
        self._stack.append(self._memo[number] if number < len(self._memo) else self._sparse_memo[number])

    # Objects.

    def push_named(self, *, on_stack: bool) -> None:
        """Push the object for the name of a class or function."""
        if on_stack:
            name, module = self._pop(), self._pop()
            if not isinstance(name, str) or not isinstance(module, str):
                raise PickleError("it has a name that is not a string")
        else:
            module, name = self._line(), self._line()
        self._stack.append(self._resolve_name(module, name))

    def call(self) -> None:
        """Call a function or class with a tuple of arguments."""
        arguments, function = self._pop(), self._pop()
        self._push(self.apply(function, arguments), 0)

    def apply(self, function: Any, arguments: Any) -> Any:
        """Return the result of a function or class for these arguments."""
        if type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise PickleError("it calls a function with arguments that are not a tuple")
        if isinstance(function, AllowedFunction):
            return function.function(self._budget, *arguments)
        if isinstance(function, type) and issubclass(function, PickleStandIn):
            self._budget.charge(_BAG)
            return function(arguments)
        raise PickleError(f"it calls a {type(function).__name__}")

    def make(self, *, named: bool) -> None:
        """Push a stand-in object, made from its class and a tuple of arguments."""
        if named and self._pop() != {}:
            raise PickleError("it makes an object from named arguments")
        arguments, kind = self._pop(), self._pop()
        if not (isinstance(kind, type) and issubclass(kind, PickleStandIn)):
            raise PickleError(f"it makes an object of {kind!r:.100}")
        self._push(self.apply(kind, arguments), 0)

    def build(self) -> None:
        """Set the state of a stand-in. Attributes of a dictionary (torch's `_metadata`) are dropped."""
        state, target = self._pop(), self._top()
        if type(target) is dict:
            return
        if not isinstance(target, PickleStandIn):
            raise PickleError(f"it changes the state of a {type(target).__name__}")
        parts = state if type(state) is tuple else (state,)
        self._budget.charge(sum(getsizeof(part) for part in parts[:_MOST_ARGUMENTS]))
        target.set_state(state)

    def push_persistent(self) -> None:
        """Push the object for the persistent ID on the stack."""
        self._push(self._resolve_persistent(self._pop()), 0)

    def skip(self, count: int) -> None:
        """Skip bytes without meaning here: a protocol number, the length of a frame."""
        self._take(count)


_CONTAINER_TYPES = (dict, list, tuple, set, frozenset, PickleStandIn, bytes)


def check_tree(value: Any, budget: MemoryBudget) -> None:
    """Check the nesting depth of a value, and charge each of its references to the budget.

    Code that traverses a value visits an object once per reference, so shared objects are charged several times.

    Raises:
        PickleError: the value is nested too deeply, contains itself, or has more references than the budget allows.
    """
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, bytes):
            budget.charge(len(item))
            continue
        if isinstance(item, dict):
            inner: Any = [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            inner = item
        elif isinstance(item, PickleStandIn):
            inner = item.children()
        else:
            continue
        if depth >= MOST_DEPTH:
            raise PickleError(f"its values are more than {MOST_DEPTH} deep, or contain themselves")
        budget.charge(_VALUE * len(inner))
        stack.extend((one, depth + 1) for one in inner if isinstance(one, _CONTAINER_TYPES))


def _op(method: Callable[..., None], *arguments: Any, **named: Any) -> Callable[[SafeUnpickler], None]:
    return lambda reader: method(reader, *arguments, **named)


_BYTE = struct.Struct("<B")
_U = SafeUnpickler
_OPCODES: dict[int, Callable[[SafeUnpickler], None]] = {
    ord(code): opcode
    for code, opcode in {
        "\x80": _op(_U.skip, 1),  # PROTO
        "\x95": _op(_U.skip, 8),  # FRAME
        "(": _op(_U.mark),
        "0": _op(_U.pop),
        "1": _op(_U.pop_mark),
        "2": _op(_U.duplicate),
        "N": _op(_U.constant, None),
        "\x88": _op(_U.constant, True),
        "\x89": _op(_U.constant, False),
        "J": _op(_U.integer, _INT32),
        "K": _op(_U.integer, _BYTE),
        "M": _op(_U.integer, _INT16),
        "\x8a": _op(_U.large, _BYTE),
        "\x8b": _op(_U.large, _INT32),
        "G": _op(_U.integer, _FLOAT),
        "X": _op(_U.text, _UINT32),
        "\x8c": _op(_U.text, _BYTE),
        "\x8d": _op(_U.text, _UINT64),
        "B": _op(_U.raw, _UINT32),
        "C": _op(_U.raw, _BYTE),
        "\x8e": _op(_U.raw, _UINT64),
        "]": _op(_U.empty, list),
        "}": _op(_U.empty, dict),
        "\x8f": _op(_U.empty, set),
        ")": _op(_U.empty, tuple),
        "a": _op(_U.append, several=False),
        "e": _op(_U.append, several=True),
        "l": _op(_U.push_from_mark, list),
        "d": _op(_U.push_from_mark, dict),
        "\x91": _op(_U.push_from_mark, frozenset),
        "\x90": _op(_U.add),
        "s": _op(_U.set_item, several=False),
        "u": _op(_U.set_item, several=True),
        "t": _op(_U.tuple_of, None),
        "\x85": _op(_U.tuple_of, 1),
        "\x86": _op(_U.tuple_of, 2),
        "\x87": _op(_U.tuple_of, 3),
        "q": _op(_U.put, _BYTE),
        "r": _op(_U.put, _UINT32),
        "\x94": _op(_U.put, None),  # MEMOIZE
        "h": _op(_U.get, _BYTE),
        "j": _op(_U.get, _UINT32),
        "c": _op(_U.push_named, on_stack=False),
        "\x93": _op(_U.push_named, on_stack=True),
        "R": _op(_U.call),
        "\x81": _op(_U.make, named=False),  # NEWOBJ
        "\x92": _op(_U.make, named=True),  # NEWOBJ_EX
        "b": _op(_U.build),
        "Q": _op(_U.push_persistent),
    }.items()
}
