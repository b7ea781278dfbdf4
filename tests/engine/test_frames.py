"""Record files: appended, read lazily, read one, and cut at any byte."""

from __future__ import annotations

import io

import pytest
import zstandard

from rl360.engine import frames

RECORDS = [{"number": i, "text": "ü" * i * 50} for i in range(4)]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "records.jsonl.zst"
    frames.append(file, [frames.pack(record) for record in RECORDS[:2]])
    frames.append(file, [frames.pack(record) for record in RECORDS[2:]])
    return file


def test_records_come_back_in_order_and_each_alone(path):
    found = list(frames.scan(path))
    assert [record for _, _, record in found] == RECORDS
    assert [frames.read_one(path, offset) for offset, _, _ in found] == RECORDS
    assert [end for _, end, _ in found] == [*[offset for offset, _, _ in found][1:], path.stat().st_size]


def test_plain_zstd_reads_json_lines(path):
    with open(path, "rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        assert len(list(io.TextIOWrapper(stream, encoding="utf-8"))) == len(RECORDS)


def test_a_cut_at_any_byte_loses_only_what_it_cut(path):
    data = path.read_bytes()
    ends = [end for _, end, _ in frames.scan(path)]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert [record for _, _, record in frames.scan(path)] == RECORDS[:whole]
        assert frames.mend(path) == ([0, *ends])[whole] == path.stat().st_size
        frames.append(path, [frames.pack({"after": size})])
        assert [record for _, _, record in frames.scan(path)] == [*RECORDS[:whole], {"after": size}]


def test_a_flipped_bit_in_the_last_record_is_noticed(path):
    data = bytearray(path.read_bytes())
    data[-6] ^= 0x10
    path.write_bytes(data)
    assert [record for _, _, record in frames.scan(path)] == RECORDS[:3]


def test_reading_holds_one_record_at_a_time(tmp_path):
    path = tmp_path / "large.jsonl.zst"
    for i in range(3):
        frames.append(path, [frames.pack({"number": i, "text": "x" * 2_000_000})])
    scan = frames.scan(path)
    assert next(scan)[2]["number"] == 0
    scan.close()


def test_no_file_is_an_empty_one(tmp_path):
    assert frames.mend(tmp_path / "none.zst") == 0
    with pytest.raises(ValueError, match="JSON"):
        frames.pack({"value": float("nan")})


def test_replace_file_leaves_no_temporary(tmp_path):
    frames.replace_file(tmp_path / "a.json", b"old")
    frames.replace_file(tmp_path / "a.json", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.json", b"new")]
