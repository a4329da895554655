"""Files that no library writes: damaged, ambiguous, or made to cost a reader time and memory. And sound ones."""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bigsci_launch.weights.formats.torch_file import LEGACY_START

Write = Callable[[], bytes]
Records = Iterable[tuple[str, bytes]]

EIGHT = struct.pack("<2f", 1, 1)
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TEXT = "w=Parameter containing:\ntensor([1., 1.], requires_grad=True)\n"
DIGESTS: dict[str, Any] = {
    "schema_version": 1,
    "algorithm": "xxh3-128",
    "rank": 0,
    "coordinate": {"pp": 0, "tp": 0, "dp": 0},
    "step": 1,
    "when": "after",
    "tensors": {"w": ["F32", [2], "ab" * 16]},
}


# Safetensors.


def safetensors(header: object, data: bytes = EIGHT) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {**ENTRY, **changes}}


def numbered_entries(count: int) -> bytes:
    entries = (b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(count))
    return b"{" + b",".join(entries) + b"}"


U8 = {"dtype": "U8", "shape": [2]}
PLAIN = json.dumps(ENTRY).encode()
HEADERS: dict[str, object] = {
    "lists nested 100,000 deep": b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects nested 100,000 deep": b'{"w":' * 100_000 + b"1" + b"}" * 100_000,
    "metadata nested 100,000 deep": b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "negative length": entry(shape=[-2]),
    "two negative lengths": entry(shape=[-1, -2]),
    "length as float": entry(shape=[2.0]),
    "length as bool": entry(shape=[True], data_offsets=[0, 4]),
    "length as text": entry(shape=["2"]),
    "shape as text": entry(shape="2"),
    "length of 2**70": entry(shape=[2**70, 0], data_offsets=[0, 0]),
    "length of 5,000 digits": b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
    "more elements than bytes": entry(shape=[2**62]),
    "70 dimensions": entry(shape=[1] * 69 + [2]),
    "400 dimensions": entry(shape=[1] * 399 + [2]),
    "offsets as floats": entry(data_offsets=[0.0, 8.0]),
    "offsets as text": entry(data_offsets="08"),
    "three offsets": entry(data_offsets=[0, 8, 9]),
    "offsets as bools": entry(shape=[1], dtype="U8", data_offsets=[False, True]),
    "negative offset": entry(data_offsets=[-8, 0]),
    "offsets past the end": entry(shape=[4], data_offsets=[0, 16]),
    "overlap": {"a": ENTRY, "b": ENTRY},
    "hole": {"a": {**U8, "data_offsets": [0, 2]}, "b": {**U8, "data_offsets": [6, 8]}},
    "hole at the start": {"a": {**U8, "data_offsets": [6, 8]}},
    "name twice": b'{"w":' + PLAIN + b',"w":' + PLAIN + b"}",
    "key of an entry twice": b'{"w":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "metadata twice": b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"2"},"w":' + PLAIN + b"}",
    "metadata as numbers": {"__metadata__": {"a": 1}, "w": ENTRY},
    "metadata as a list": {"__metadata__": ["a"], "w": ENTRY},
    "metadata as objects": {"__metadata__": {"a": {"b": "c"}}, "w": ENTRY},
    "metadata as null": {"__metadata__": None, "w": ENTRY},
    "NaN": b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "Infinity": b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}',
    "number beyond floats": b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}',
    "unknown key": entry(more=1),
    "entry as a list": {"w": [1, 2]},
    "dtype as a list": entry(dtype=["F32"]),
    "dtype of many lines": entry(dtype="F32\n\x1b[31m"),
    "UTF-16": json.dumps({"w": ENTRY}).encode("utf-16"),
    "no UTF-8": b'{"\xff": 3}',
    "byte order mark": b"\xef\xbb\xbf" + json.dumps({"w": ENTRY}).encode(),
    "space before the header": b"   " + json.dumps({"w": ENTRY}).encode(),
    "name of 5,000 characters": {"w" * 5000: ENTRY},
    "complex128 in half its bytes": entry(dtype="C128", shape=[1]),
    "nothing": b"",
}
SAFETENSORS: dict[str, Write] = {
    **{name: lambda header=header: safetensors(header) for name, header in HEADERS.items()},  # type: ignore[misc]
    "bytes after the last tensor": lambda: safetensors({"w": ENTRY}, EIGHT + b"more"),
    "last tensor cut": lambda: safetensors({"w": ENTRY}, EIGHT[:5]),
    "header of 2**64 - 1 bytes": lambda: struct.pack("<q", -1) + EIGHT,
    "header of no bytes": lambda: struct.pack("<Q", 0) + EIGHT,
    "no bytes": lambda: b"",
}
HEADER_OF_99_MB = 99_000_000
LARGE_SAFETENSORS: dict[str, Write] = {
    "99 MB of spaces": lambda: safetensors(json.dumps({"w": ENTRY}).encode().ljust(HEADER_OF_99_MB)),
    "20 MB of lists": lambda: safetensors(b'{"w":[' + b"[]," * 6_900_000 + b"1]}"),
    "20 MB of keys": lambda: safetensors(b"{" + b",".join(b'"%d":1' % number for number in range(1_700_000)) + b"}"),
    "300,000 tensors": lambda: safetensors(numbered_entries(300_000), b""),
    "20 MB of text": lambda: safetensors(b'{"__metadata__":{"a":"\xf0\x9f\x98\x80' + b"x" * 20_000_000 + b'"}}', b""),
}


# Zips and pickles.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def storage(kind: str = "FloatStorage", key: bytes = text("0")) -> bytes:
    return b"(" + text("storage") + named("torch", kind) + key + text("cpu") + b"K\x02tQ"


def tensor(shape: Iterable[int], strides: Iterable[int], offset: int = 0, kind: str = "FloatStorage") -> bytes:
    layout = storage(kind) + number(offset) + numbers(shape) + numbers(strides)
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + layout + b"\x89NtR"


def tree(**items: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in items.items()) + b"u."


GOOD = tensor((2,), (1,))
WEIGHTS = tree(w=GOOD)


def zipped(records: Records, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", compression) as archive:
        warnings.simplefilter("ignore")  # two records of one name
        for name, data in records:
            archive.writestr(name, data)
    return stream.getvalue()


def torch_zip(pickled: bytes, data: bytes = EIGHT) -> bytes:
    return zipped([("a/data.pkl", pickled), ("a/data/0", data)])


def legacy(pickled: bytes, keys: object = ("0",), data: bytes = struct.pack("<q", 2) + EIGHT) -> bytes:
    """Return a file of torch < 1.6: `keys` as a pickle, or as an object that becomes one."""
    listed = keys if isinstance(keys, bytes) else pickle.dumps(list(keys) if isinstance(keys, tuple) else keys, 2)
    about = pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    return LEGACY_START + about + pickled + listed + data


def patched(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def damaged_zip(record: str, offset: int, new: bytes, *, in_directory: bool = False) -> bytes:
    """Return a sound zip with bytes changed in one of the two headers of a record."""
    raw = torch_zip(WEIGHTS)
    at = zipfile.ZipFile(io.BytesIO(raw)).getinfo(record).header_offset
    if in_directory:
        at = raw.rindex(record.encode()) - 46
    return patched(raw, at + offset, new)


def with_comment(comment: bytes) -> bytes:
    return torch_zip(WEIGHTS)[:-2] + struct.pack("<H", len(comment)) + comment


def bomb(name: str, num_bytes: int) -> bytes:
    records = {"a/data.pkl": WEIGHTS, "a/data/0": EIGHT, name: bytes(num_bytes)}
    return zipped(records.items(), zipfile.ZIP_DEFLATED)


FAKE_END = b"PK\x05\x06" + bytes(18)
ZIPS: dict[str, Write] = {
    "two records of one name": lambda: zipped([("a/data.pkl", WEIGHTS), ("a/data/0", EIGHT), ("a/data/0", bytes(8))]),
    "one name with and without folder": lambda: zipped([("a/data.pkl", WEIGHTS), ("a/data/0", EIGHT), ("data/0", b"")]),
    "local header without signature": lambda: damaged_zip("a/data/0", 0, b"XXXX"),
    "local header of another name": lambda: damaged_zip("a/data/0", 30, b"b"),
    "local header of a shorter name": lambda: damaged_zip("a/data/0", 26, b"\x01\0"),
    "local header of another length": lambda: damaged_zip("a/data/0", 18, struct.pack("<2L", 4, 4)),
    "local header of another checksum": lambda: damaged_zip("a/data/0", 14, b"\1\2\3\4"),
    "local header of another method": lambda: damaged_zip("a/data/0", 8, b"\x08\0"),
    "local header of an encrypted record": lambda: damaged_zip("a/data/0", 6, b"\x01\0"),
    "record outside the file": lambda: damaged_zip("a/data/0", 42, struct.pack("<L", 10**9), in_directory=True),
    "record longer than the file": lambda: damaged_zip(
        "a/data/0", 20, struct.pack("<2L", 10**9, 10**9), in_directory=True
    ),
    "record that is encrypted": lambda: damaged_zip("a/data/0", 8, b"\x01\0", in_directory=True),
    "record of an unknown method": lambda: damaged_zip("a/data/0", 10, b"\x0e\0", in_directory=True),
    "two records in one place": lambda: damaged_zip("a/data/0", 42, bytes(4), in_directory=True),
    "entry without signature": lambda: damaged_zip("a/data/0", 0, b"XXXX", in_directory=True),
    "name beyond the directory": lambda: damaged_zip("a/data/0", 28, b"\xff\xff", in_directory=True),
    "bytes before the zip": lambda: b"PK\x03\x04" + bytes(100) + torch_zip(WEIGHTS),
    "bytes after the zip": lambda: torch_zip(WEIGHTS) + bytes(10),
    "end inside a comment": lambda: with_comment(FAKE_END + b"hello"),
    "end at the end of a comment": lambda: with_comment(b"hello" + FAKE_END),
    "end without records": lambda: b"PK\x03\x04" + bytes(40) + FAKE_END,
    "zip without an end": lambda: torch_zip(WEIGHTS)[:-30],
    "pickle of 256 MB": lambda: bomb("a/data.pkl", 1 << 28),
    "storage of 257 MiB in 257 KiB": lambda: bomb("a/data/0", 257 << 20),
    "byte order of 60 MB in 60 KB": lambda: bomb("a/byteorder", 60 << 20),
    "checksum of a compressed pickle": lambda: patched(
        raw := bomb("a/more", 1), raw.rindex(b"a/data.pkl") - 46 + 16, b"\1\2\3\4"
    ),
    "no data.pkl": lambda: zipped([("a/readme", b"")]),
}

DOUBLED = b")" + b"2\x86" * 60
PICKLES: dict[str, bytes] = {
    "lists nested 5,000 deep": tree(w=GOOD, n=b"]" * 5000 + b"a" * 4999),
    "tuples nested 5,000 deep": tree(w=GOOD, n=b")" + b"\x85" * 5000),
    "dictionaries nested 5,000 deep": tree(w=GOOD, n=b"}" + b"K\x01}" * 5000 + b"s" * 5000),
    "doubled tuple": tree(w=GOOD, n=DOUBLED),
    "doubled tuple in a set": b"\x80\x04}" + text("n") + b"\x8f(" + DOUBLED + b"\x90s.",
    "doubled lists": tree(w=GOOD, n=b"]" + b"".join(b"q%c](" % n + b"h%c" % n * 10 + b"e" for n in range(1, 60))),
    "long text 100,000 times": tree(w=GOOD, n=text("x" * 500_000) + b"q\x01](" + b"h\x01N\x86" * 100_000 + b"e"),
    "long key 20,000 times": tree(w=GOOD, n=text("x" * 100_000) + b"q\x01](" + b"}h\x01]Nas" * 20_000 + b"e"),
    "long keys above each other": b"\x80\x02" + (b"}" + text("k" * 5000)) * 190 + b"](NNe" + b"s" * 190 + b".",
    "number of 100 MB": b"\x80\x02\x8b" + struct.pack("<i", 100 << 20) + b"\x7f.",
    "number of 100 KB": b"\x80\x02\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000 + b".",
    "number of negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
    "number of 5,000 digits": b"I" + b"1" * 5000 + b"\n.",
    "float of 5,000 digits": b"F" + b"1" * 5000 + b"\n.",
    "line without an end": b"V" + b"x" * 10_000,
    "memo that is empty": tree(w=GOOD, n=b"j" + struct.pack("<I", 2**31)),
    "pops of nothing": b"0" * 10 + b".",
    "nothing": b"",
    "stop": b".",
    "no stop": b"\x80\x02",
    "unknown operation": b"\xff.",
    "unknown protocol": b"\x80\x06N.",
    "buffer outside": b"\x80\x05\x97.",
    "call of a number": tree(w=GOOD, n=b"K\x01K\x02R"),
    "items of a number": tree(w=GOOD, n=b"K\x01(K\x01K\x02u"),
    "key without a value": tree(w=GOOD, n=b"}(K\x01u"),
    "name of a class of 2,000 characters": tree(w=GOOD, n=named("m" * 2000, "n")),
    "state set 2,000 times": tree(w=GOOD, n=b"}" + b"Nb" * 2000),
    "list copied 100,000 times": b"\x80\x02](" + b"N" * 1000 + b"eq\x010cbuiltins\nlist\nq\x020("
    + b"h\x02h\x01\x85R" * 100_000 + b"l.",
    "reference to nothing": tree(w=b"(K\x01K\x02tQ"),
    "reference of texts": tree(w=b"(" + text("storage") * 6 + b"tQ"),
    "reference by a list": tree(w=storage(key=b"]")),
    "reference by 4,300 digits": tree(w=storage(key=b"I" + b"9" * 4300 + b"\n")),
    "reference to no record": tree(w=storage(key=text("7"))),
    "tensor of 70 dimensions": tree(w=tensor((2, *[1] * 69), [1] * 70)),
    "tensor of 400 dimensions": tree(w=tensor((2, *[1] * 399), [1] * 400)),
    "tensor of 400 dimensions of no elements": tree(w=tensor((0, *[1] * 399), [1] * 400)),
    "tensor of 69 repeated dimensions": tree(w=tensor([2] * 69, [0] * 68 + [1])),
    "negative stride": tree(w=tensor((2,), (-1,), 1)),
    "negative offset": tree(w=tensor((2,), (1,), -1)),
    "negative length": tree(w=tensor((-2,), (1,))),
    "fewer strides than lengths": tree(w=tensor((2,), (1, 1))),
    "overlapping strides": tree(w=tensor((2**18, 2**18), (0, 1))),
    "beyond the storage": tree(w=tensor((3,), (1,))),
    "offset beyond the storage": tree(w=tensor((2,), (1,), 1)),
    "offset of 2**62": tree(w=tensor((1,), (1,), 2**62)),
    "length of 2**63": tree(w=tensor((2**63,), (1,))),
    "stride of 2**62": tree(w=tensor((2,), (2**62,))),
    "complex128 in half its bytes": tree(w=tensor((1,), (1,), kind="ComplexDoubleStorage")),
}  # fmt: skip
TORCH: dict[str, Write] = {
    **ZIPS,
    **{f"zip: {name}": lambda raw=raw: torch_zip(raw) for name, raw in PICKLES.items()},  # type: ignore[misc]
    **{f"legacy: {name}": lambda raw=raw: legacy(raw) for name, raw in PICKLES.items()},  # type: ignore[misc]
    "legacy: storage key twice": lambda: legacy(WEIGHTS, ("0", "0"), (struct.pack("<q", 2) + EIGHT) * 2),
    "legacy: storage key as a list": lambda: legacy(WEIGHTS, (["0"],)),
    "legacy: storage keys as text": lambda: legacy(WEIGHTS, "0"),
    "legacy: no storage keys": lambda: legacy(WEIGHTS, ()),
    "legacy: storage keys that contain themselves": lambda: legacy(WEIGHTS, b"]q\x01h\x01a."),
    "legacy: storage keys that are doubled": lambda: legacy(WEIGHTS, b"\x80\x02(" + DOUBLED + b"l."),
    "legacy: storage keys nested deep": lambda: legacy(WEIGHTS, b"(" + b"(" * 1000 + b"t" * 1000 + b"l."),
    "legacy: storage of negative length": lambda: legacy(WEIGHTS, data=struct.pack("<q", -2) + EIGHT),
    "legacy: storage of 2**62 elements": lambda: legacy(WEIGHTS, data=struct.pack("<q", 2**62) + EIGHT),
    "legacy: storage cut": lambda: legacy(WEIGHTS, data=struct.pack("<q", 2)),
}
LARGE_TORCH: dict[str, Write] = {
    "storage of 256 MiB in 256 KiB": lambda: bomb("a/data/0", 256 << 20),
    "200 MB of operations": lambda: torch_zip(b"\x80\x02" + b"N0" * (100 << 20) + b"N."),
    "62 MB of operations": lambda: torch_zip(b"\x80\x02" + b"N0" * (31 << 20) + b"N."),
    "dictionaries": lambda: torch_zip(b"\x80\x02(" + b"}" * 990_000 + b"l."),
    "sets": lambda: torch_zip(b"\x80\x04(" + b"\x8f" * 990_000 + b"l."),
    "objects": lambda: torch_zip(b"\x80\x02ca\nb\nq\x010(" + b"h\x01)\x81" * 330_000 + b"l."),
    "marks": lambda: torch_zip(b"\x80\x02" + b"(" * 999_000 + b"."),
    "numbers": lambda: torch_zip(b"\x80\x02(" + number(1000) * 950_000 + b"l."),
    "tuples as keys of one hash": lambda: torch_zip(
        b"\x80\x02}(" + b"".join(numbers((n, -n)) + b"N" for n in range(40_000)) + b"u."
    ),
    "numbers as keys of one hash": lambda: torch_zip(
        b"\x80\x02}(" + b"".join(number((2**61 - 1) * n) + b"N" for n in range(1, 60_000)) + b"u."
    ),
    "20 MB of text": lambda: torch_zip(tree(w=GOOD, s=text("\U0001f600".encode() + b"x" * 20_000_000))),
}


# Digests and printed tensors.


def digests(**changes: Any) -> bytes:
    return json.dumps({**DIGESTS, **changes}).encode()


def digest_of_w(*given: Any) -> bytes:
    return digests(tensors={"w": list(given)})


DIGEST_FILES: dict[str, bytes] = {
    "list": b"[1]",
    "lists nested 100,000 deep": b"[" * 100_000,
    "algorithm nested 100,000 deep": b'{"algorithm":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "algorithm as a list": digests(algorithm=["xxh3-128"]),
    "algorithm of 1 MB": digests(algorithm="x" * (1 << 20)),
    "no coordinate": digests(coordinate=None),
    "coordinate as text": digests(coordinate="pp0"),
    "coordinate of floats": digests(coordinate={"pp": 0.5, "tp": 0, "dp": 0}),
    "coordinate of lists": digests(coordinate={"pp": [], "tp": 0, "dp": 0}),
    "negative coordinate": digests(coordinate={"pp": -1, "tp": 0, "dp": 0}),
    "coordinate of 30 digits": digests(coordinate={"pp": 10**30, "tp": 0, "dp": 0}),
    "tensors as a list": digests(tensors=[1]),
    "dtype as a list": digest_of_w(["F32"], [2], "ab" * 16),
    "negative length": digest_of_w("F32", [-2], "ab" * 16),
    "length as float": digest_of_w("F32", [2.5], "ab" * 16),
    "length as list": digest_of_w("F32", [[2]], "ab" * 16),
    "length as text": digest_of_w("F32", ["2"], "ab" * 16),
    "digest as number": digest_of_w("F32", [2], 5),
    "digest as null": digest_of_w("F32", [2], None),
    "digest of two characters": digest_of_w("F32", [2], "zz"),
    "no digest": digest_of_w("F32", [2]),
    "step as text": digests(step="x"),
    "step as NaN": digests(step=float("nan")),
    "version 99": digests(schema_version=99),
    "tensor twice": digests().replace(b'{"w":', b'{"w": ["F32", [2], "' + b"cd" * 16 + b'"], "w":'),
    "tensors twice": digests()[:-1] + b',"tensors":{}}',
    "nothing": b"",
}
TEXTS: dict[str, bytes] = {
    "1,000,000 brackets": b"w=tensor(" + b"[" * 1_000_000 + b"1." + b"]" * 1_000_000 + b")\n",
    "closing brackets first": b"w=tensor(]]]][[[[1.)\n",
    "gap outside the brackets": b"w=tensor(... 1., ...)\n",
    "exponent of 999999": b"w=tensor([1.e999999])\n",
    "exponent of 5,000 digits": b"w=tensor([1.5e" + b"9" * 5000 + b"])\n",
    "number of 100,000 digits": b"w=tensor([" + b"9" * 100_000 + b"])\n",
    "sparse tensor": b"w=tensor(indices=tensor([[0, 1]]),\n       values=tensor([1., 1.]), layout=torch.sparse_coo)\n",
    "name twice": TEXT.encode() * 2,
    "bytes after the last tensor": TEXT.encode() + bytes(1000),
    "text before the first tensor": b"a line of a log\n" + TEXT.encode(),
    "text between two tensors": TEXT.encode() + b"a line of a log\n" + TEXT.replace("w=", "v=").encode(),
    "number of 32 characters": b"w=tensor([1.000000000000000000000000000000])\n",
}
LARGE_TEXTS: dict[str, Write] = {
    "line of 64 MB": lambda: b"w=tensor([" + b"1.0000, " * (64 << 17) + b"1.])\n",
    "1,600,000 names": lambda: TEXT.encode() + b"a=tensor(\n" * 1_600_000,
}
SOUND: Mapping[str, bytes] = {
    ".safetensors": safetensors({"w": ENTRY}),
    ".pt": torch_zip(WEIGHTS),
    ".digests.json": digests(),
    ".txt": TEXT.encode(),
}
