from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.files import atomic_write
from devmap_cli.mapfile import (
    MapDevice,
    MapFile,
    MapModel,
    MapTransfer,
    MapWorkload,
    write_map,
)
from devmap_cli.mapreader import MAX_MAP_BYTES, read_map

GPU_0, GPU_1, NPU_0, CPU, DISK = (Device.parse(name) for name in ("0", "1", "npu:0", "cpu", "disk"))


def example() -> MapFile:
    return MapFile(
        device_map={"model.embed_tokens": GPU_0, "model.layers.0": NPU_0, "lm_head": CPU},
        model=MapModel("org/model", "abc123", "LlamaForCausalLM", "bfloat16", {"scheme": "nf4"}),
        strategy="balanced",
        workload=MapWorkload(2, 4096, 128, ((1024, 768),), "eager"),
        # 100 = 40 + 30 + 20 + 5 used, 5 free
        devices=(MapDevice(GPU_0, 100, 40, 30, 20, 5),),
        transfers=(MapTransfer(GPU_0, NPU_0, 8192),),
        versions={"devmap": "0.1.0"},
    )


def document(**changes: Any) -> dict[str, Any]:
    return {**example().to_document(), **changes}


def write_json(folder: Path, content: object) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(content))
    return path


def changed(name: str, field: str, value: object) -> dict[str, Any]:
    """The example's document with one field of one part changed."""
    found = document()
    return {**found, name: {**found[name], field: value}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (("model", "dtype", "nope"), "'dtype' is 'nope', which is no floating-point dtype"),
        (("workload", "attention", "nope"), "'nope' is no attention of transformers"),
        (("workload", "kv_dtype", "int3"), "'kv_dtype': a KV cache is not kept in 'int3'"),
        (("workload", "kv_dtype", 4), "is 4, not a printable text"),
        (("workload", "batch_size", 10**30), "'batch_size' is more than anything has"),
    ],
)
def test_values_that_nothing_has(tmp_path: Path, content: tuple[str, str, object], said: str) -> None:
    error = refusal(write_json(tmp_path, changed(*content)))
    assert said in error.message
    assert error.hint


def test_an_empty_name_is_refused() -> None:
    for attempt in (lambda: read_map(""), lambda: write_map(example(), "")):
        with pytest.raises(RequestError, match="is empty"):
            attempt()


def refusal(path: Path | str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_map(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


class TestDocument:
    def test_a_map_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        write_map(example(), tmp_path / "map.json")
        assert read_map(tmp_path / "map.json") == example()

    def test_keys_come_in_the_order_of_the_format(self) -> None:
        found = json.loads(example().to_bytes())
        assert list(found) == [
            "format",
            "model",
            "strategy",
            "workload",
            "devices",
            "transfers",
            "device_map",
            "versions",
        ]
        assert list(found["model"]) == ["id", "revision", "class", "dtype", "quantization"]
        assert found["format"] == "devmap.map/1"
        assert found["devices"][0]["peak_bytes"] == 95
        assert found["devices"][0]["free_bytes"] == 5

    def test_accelerators_of_this_machine_are_numbers_for_from_pretrained(self) -> None:
        assert example().to_document()["device_map"] == {
            "model.embed_tokens": 0,
            "model.layers.0": "npu:0",
            "lm_head": "cpu",
        }

    def test_bytes_are_the_same_each_time_and_end_with_one_newline(self) -> None:
        assert example().to_bytes() == example().to_bytes()
        assert example().to_bytes().endswith(b"}\n")

    def test_a_bare_map_has_no_model_and_stays_bare(self, tmp_path: Path) -> None:
        found = read_map(write_json(tmp_path, {"": 0, "lm_head": "disk"}))
        assert found == MapFile({"": GPU_0, "lm_head": DISK})
        assert found.to_document() == {"": 0, "lm_head": "disk"}

    @given(
        st.dictionaries(
            st.text(st.characters(categories=["L", "N", "P"]), min_size=1).filter(
                lambda key: key not in ("format", "device_map")
            ),
            st.sampled_from([0, 7, "npu:1", "xpu:0", "mps", "cpu", "disk"]),
            min_size=1,
        )
    )
    def test_any_bare_map_survives_reading_and_writing(self, content: dict[str, int | str]) -> None:
        read = MapFile({module: Device.parse(value) for module, value in content.items()})
        assert json.loads(read.to_bytes()) == content

    def test_extra_keys_do_not_disturb(self, tmp_path: Path) -> None:
        assert read_map(write_json(tmp_path, document(note="mine"))) == example()

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(example().to_bytes())))
        assert read_map("-") == example()

    def test_empty_standard_input_blames_the_command_before_the_pipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"")))
        error = refusal("-")
        assert error.message == "standard input is empty"
        assert "before the pipe" in (error.hint or "")

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
    def test_what_windows_editors_and_shells_write(self, tmp_path: Path, encoding: str) -> None:
        path = tmp_path / "map.json"
        path.write_text(example().to_bytes().decode(), encoding=encoding)
        assert read_map(path) == example()


class TestRefusals:
    def test_not_json_says_where(self, tmp_path: Path) -> None:
        path = tmp_path / "map.json"
        path.write_text('{"lm_head": 0,\n "model" 1}')
        assert "line 2, column 10" in refusal(path).message

    @pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
    def test_json_that_python_would_take_or_choke_on(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "map.json"
        path.write_text(text)
        assert "not JSON" in refusal(path).message

    @pytest.mark.parametrize(
        ("content", "named"), [([1], "an array"), ("x", "a string"), (None, "null"), (3, "a number")]
    )
    def test_not_an_object(self, tmp_path: Path, content: object, named: str) -> None:
        assert named in refusal(write_json(tmp_path, content)).message

    def test_newer_format(self, tmp_path: Path) -> None:
        error = refusal(write_json(tmp_path, document(format="devmap.map/2")))
        assert "written by a newer devmap" in error.message
        assert "--upgrade" in (error.hint or "")

    @pytest.mark.parametrize("found", ["other/1", "devmap.map/", 1, None])
    def test_unknown_format(self, tmp_path: Path, found: object) -> None:
        assert "unknown format" in refusal(write_json(tmp_path, document(format=found))).message

    @pytest.mark.parametrize(
        "device", ["gpu0", "tpu:0", "cuda", "cuda:-1", "meta", "", -1, True, False, 0.0, None, [0], {"a": 0}]
    )
    def test_no_device(self, tmp_path: Path, device: object) -> None:
        for content in ({"lm_head": device}, document(device_map={"lm_head": device})):
            error = refusal(write_json(tmp_path, content))
            assert "lm_head" in error.message
            assert "is no device" in error.message

    @pytest.mark.parametrize("key", ["a\nb", "\x1b[31m", "\ud800"])
    def test_keys_that_would_harm_a_terminal(self, tmp_path: Path, key: str) -> None:
        assert "no module name" in refusal(write_json(tmp_path, {key: 0})).message

    def test_duplicate_keys(self, tmp_path: Path) -> None:
        path = tmp_path / "map.json"
        path.write_text('{"lm_head": 0, "model": 0, "lm_head": 1}')
        assert "'lm_head' twice" in refusal(path).message

    @pytest.mark.parametrize("content", [{}, document(device_map={})])
    def test_empty_map(self, tmp_path: Path, content: object) -> None:
        assert "is empty" in refusal(write_json(tmp_path, content)).message

    @pytest.mark.parametrize("key", [key for key in example().to_document() if key != "format"])
    def test_missing_parts(self, tmp_path: Path, key: str) -> None:
        content = document()
        del content[key]
        assert f"'{key}' is missing" in refusal(write_json(tmp_path, content)).message

    @pytest.mark.parametrize("key", [key for key in example().to_document() if key != "format"])
    @pytest.mark.parametrize("value", [None, 1.5, True])
    def test_parts_of_a_wrong_type(self, tmp_path: Path, key: str, value: object) -> None:
        assert key in refusal(write_json(tmp_path, document(**{key: value}))).message

    def test_the_very_field_is_named(self, tmp_path: Path) -> None:
        content = document()
        content["devices"][0]["budget_bytes"] = -5
        assert "'devices'[0]: 'budget_bytes' is -5" in refusal(write_json(tmp_path, content)).message

    def test_figures_that_do_not_add_up(self, tmp_path: Path) -> None:
        content = document()
        content["devices"][0]["peak_bytes"] = 96
        assert "the sum of its parts, 95" in refusal(write_json(tmp_path, content)).message

    @pytest.mark.parametrize("size", [[1], [1, 2, 3], [1, 0], "ab"])
    def test_images_that_are_no_sizes(self, tmp_path: Path, size: object) -> None:
        content = document()
        content["workload"]["images"] = [size]
        assert "'images'[0]" in refusal(write_json(tmp_path, content)).message

    def test_videos_are_read_back_and_not_written_where_there_are_none(self, tmp_path: Path) -> None:
        workload = MapWorkload(videos=((480, 640, 16),))
        written = replace(example(), workload=workload)
        path = write_json(tmp_path, written.to_document())
        assert read_map(path).workload == workload
        assert "videos" not in example().to_document()["workload"]

    @pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4", "int2"])
    def test_what_the_kv_cache_is_kept_in_is_read_back_and_not_written_where_it_is_auto(
        self, tmp_path: Path, kv_dtype: str
    ) -> None:
        workload = MapWorkload(kv_dtype=kv_dtype)
        path = write_json(tmp_path, replace(example(), workload=workload).to_document())
        assert read_map(path).workload == workload
        assert "kv_dtype" not in example().to_document()["workload"]

    @pytest.mark.parametrize("size", [[1], [1, 2], [1, 2, 0], [1, 2, 3, 4], "abc"])
    def test_videos_that_are_no_sizes(self, tmp_path: Path, size: object) -> None:
        content = document()
        content["workload"]["videos"] = [size]
        assert "'videos'[0]" in refusal(write_json(tmp_path, content)).message

    @pytest.mark.parametrize("raw", [b"", b"  \n", b"\xff\xfe"])
    def test_empty_file(self, tmp_path: Path, raw: bytes) -> None:
        (tmp_path / "map.json").write_bytes(raw)
        assert "is empty" in refusal(tmp_path / "map.json").message

    def test_binary_file(self, tmp_path: Path) -> None:
        (tmp_path / "map.json").write_bytes(b"\x80\x00\xff" * 100)
        assert "not a text file" in refusal(tmp_path / "map.json").message

    def test_huge_file(self, tmp_path: Path) -> None:
        with (tmp_path / "map.json").open("wb") as stream:
            stream.truncate(MAX_MAP_BYTES + 1)
        assert "larger than 16 MiB" in refusal(tmp_path / "map.json").message

    def test_folder(self, tmp_path: Path) -> None:
        assert "not a file" in refusal(tmp_path).message
        write_json(tmp_path, {"": 0})
        assert str(tmp_path / "map.json") in (refusal(tmp_path).hint or "")

    @pytest.mark.parametrize("name", ["none.json", "none/map.json"])
    def test_missing_file(self, tmp_path: Path, name: str) -> None:
        assert "does not exist" in refusal(tmp_path / name).message

    def test_a_file_used_as_a_folder(self, tmp_path: Path) -> None:
        assert "not a file" in refusal(write_json(tmp_path, {"": 0}) / "map.json").message

    @pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
    def test_names_that_no_file_has(self, name: str) -> None:
        assert "cannot read" in refusal(name).message

    def test_unreadable_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(SurroundingsError, match="may not be read"):
            read_map(tmp_path / "map.json")


class TestWriting:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        path = tmp_path / "map.json"
        path.write_bytes(b"old")
        return path

    @pytest.mark.parametrize("step", ["fsync", "open"])
    @pytest.mark.parametrize(
        ("failure", "told"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
            (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk is full"),
            (OSError(errno.EROFS, "Read-only file system"), "is read-only"),
            (OSError(errno.EACCES, "Permission denied"), "is read-only"),
            (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ],
    )
    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: OSError, told: str
    ) -> None:
        def fail(*_: object) -> None:
            raise failure

        monkeypatch.setattr(os, step, fail)
        with pytest.raises(SurroundingsError, match=told) as caught:
            atomic_write(old, b"new")
        assert caught.value.hint
        assert old.read_bytes() == b"old"
        assert list(old.parent.iterdir()) == [old]

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_an_interruption_leaves_one_whole_file(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        real = Path.replace

        def interrupt(self: Path, target: Path) -> None:
            if moment == "after":
                real(self, target)
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            atomic_write(old, b"new")
        assert old.read_bytes() == (b"old" if moment == "before" else b"new")
        assert list(old.parent.iterdir()) == [old]

    def test_a_reader_never_sees_half_a_file(self, old: Path) -> None:
        contents = [bytes([value]) * 100_000 for value in range(50)]
        seen: list[bytes] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                seen.append(old.read_bytes())

        reader = threading.Thread(target=read)
        reader.start()
        for content in contents:
            atomic_write(old, content)
        done.set()
        reader.join()
        assert set(seen) <= {b"old", *contents}

    def test_permissions_stay(self, old: Path) -> None:
        old.chmod(0o640)
        atomic_write(old, b"new")
        assert old.stat().st_mode & 0o777 == 0o640

    def test_a_new_file_follows_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            atomic_write(tmp_path / "new", b"new")
        finally:
            os.umask(before)
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640

    def test_a_link_stays_and_its_target_is_replaced(self, old: Path, tmp_path: Path) -> None:
        link = tmp_path / "link.json"
        link.symlink_to(old.name)
        atomic_write(link, b"new")
        assert link.is_symlink()
        assert old.read_bytes() == b"new"

    def test_a_file_marked_read_only_is_not_replaced(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to anything
        with pytest.raises(SurroundingsError, match="is read-only"):
            atomic_write(old, b"new")
        assert old.read_bytes() == b"old"

    @pytest.mark.parametrize("name", ["none/map.json", "map.json/map.json"])
    def test_missing_folder(self, old: Path, name: str) -> None:
        with pytest.raises(RequestError, match="does not exist") as caught:
            atomic_write(old.parent / name, b"new")
        assert caught.value.hint == f"mkdir -p '{(old.parent / name).parent}'"

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="is a folder"):
            atomic_write(tmp_path, b"new")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
    def test_a_full_disk_for_real(self) -> None:
        with pytest.raises(SurroundingsError, match="disk is full"):
            write_map(example(), "/dev/full")

    def test_a_pipe_is_written_to_and_not_replaced(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=write_map, args=(example(), pipe))
        writer.start()
        assert pipe.read_bytes() == example().to_bytes()
        writer.join()
        assert pipe.is_fifo()

    @pytest.mark.parametrize("target", ["-", "/dev/stdout", "/dev/fd/1"])
    def test_standard_output_is_appended_to_where_the_shell_appends(self, tmp_path: Path, target: str) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"before\n")
        code = f"from devmap_cli.mapfile import *; write_map(MapFile({{}}), {target!r})"
        with log.open("ab") as stream:
            subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
        assert log.read_bytes() == b"before\n{}\n"
