"""mbc compile and mbc verify."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mbc.codegen import toolchain
from mbc.codegen.toolchain import Places
from mbc.units import show_range

FP64 = ("--set", "train.precision=fp64")


@pytest.fixture(autouse=True)
def no_toolchain(monkeypatch):
    """Let no toolchain be found, because other tests cover building."""
    monkeypatch.setattr(toolchain, "_usual_places", Places)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")


def test_compile_prints_the_decisions(mbc):
    done = mbc("compile", "tiny.mbc", "--gpu", "h200")
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.out.startswith("tiny: batch 8, fp32, for NVIDIA H200 (sm_90)\n")
    for word in (
        "step       ~",
        "times      ",
        "inference  ~",
        "launches   ",
        "arena      ",
        "least      ",
        "overhead   ",
        "budget     ",
        "package    tiny (",
    ):
        assert word in done.out
    assert "missing    nvcc (compiles kernels): install the CUDA toolkit" in done.out
    assert "without it the package runs on the CPU only" in done.out
    assert {"plan.json", "__init__.py", "source"} <= {path.name for path in Path("tiny").iterdir()}


def test_compile_as_json(mbc):
    done = mbc("compile", "tiny.mbc", "-o", "out/net", "--gpu", "t4", "--set", "batch=16", "--json",
               "--without", "concurrent_stream")  # fmt: skip
    assert done.code == 0, done.err
    figures = done.json
    assert figures["batch"] == 16 and figures["architecture"] == "sm_75" and figures["package"] == "out/net"
    assert figures["library"] is None and figures["missing"]
    assert figures["arena_bytes"] >= figures["live_bytes"] >= figures["floor_bytes"] > 0
    assert figures["train_us"] >= figures["fastest_us"] > 0
    assert figures["arena_bytes"] == mbc("verify", "out/net", "--json").json["arena_bytes"]


def test_compile_twice_needs_force(mbc):
    assert mbc("compile", "tiny.mbc", *FP64).code == 0
    before = Path("tiny/plan.json").read_bytes()
    again = mbc("compile", "tiny.mbc", *FP64)
    assert again.code == 1
    assert "error MBC093: 'tiny' exists\nhelp: pass --force to replace it" in again.err
    assert mbc("compile", "tiny.mbc", *FP64, "--force").code == 0
    assert Path("tiny/plan.json").read_bytes() == before


def test_an_output_that_exists_is_refused_before_planning(mbc, monkeypatch):
    monkeypatch.setattr("mbc.planner.search", None)
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/own").write_text("")
    Path("tiny").symlink_to("full")
    for output in ((), ("-o", "full"), ("-o", "file", "--force")):
        refused = mbc("compile", "tiny.mbc", *FP64, *output)
        assert refused.code == 1
        assert f"error MBC093: '{output[1] if output else 'tiny'}' exists and was not made by mbc" in refused.err
    below = mbc("compile", "tiny.mbc", *FP64, "-o", "file/tiny")
    assert below.code == 1 and "error MBC094: cannot write 'file/tiny': Not a directory" in below.err


def test_a_name_that_python_cannot_import_is_pointed_out(mbc):
    done = mbc("compile", "tiny.mbc", *FP64, "-o", "01_tiny")
    assert "note: Python cannot import a folder called '01_tiny'" in done.out


def test_errors_of_the_source_are_shown_with_their_place(mbc):
    Path("bad.mbc").write_text("network n {\n  input x[1, 1] : float\n  y = x |> cnv(3)\n  output y\n}\n")
    done = mbc("compile", "bad.mbc")
    assert done.code == 1 and done.out == ""
    assert "bad.mbc:3:" in done.err and "^^^" in done.err and "conv" in done.err
    assert not Path("n").exists()


def test_dumped_stages(mbc):
    assert mbc("compile", "tiny.mbc", *FP64, "--dump-stages", "stages").code == 0
    dumped = [path.stem.partition("_")[2] for path in sorted(Path("stages").glob("*.txt"))]
    assert dumped == ["parse", "verify_network", "find_device", "differentiate", "search"]


def test_the_seconds_that_are_printed_are_those_of_all_stages(mbc, monkeypatch):
    """Each stage reads the clock twice; the clock advances one second at each reading, so each stage takes a second."""
    reads: list[float] = []

    def clock() -> float:
        reads.append(float(len(reads)))
        return reads[-1]

    monkeypatch.setattr("mbc.stages.perf_counter", clock)
    figures = mbc("compile", "tiny.mbc", *FP64, "--json").json
    stages = figures["stage_seconds"]
    first, *_, last = stages
    assert (first, last) == ("parse", "build package")
    assert sum(stages.values()) == len(reads) / 2
    named = [figures[f"{what}_seconds"] for what in ("measure", "plan", "build")]
    assert named == [1.0 + 1.0, sum(stages.values()) - 3.0, 1.0] and sum(named) == sum(stages.values())


def test_stages_that_cannot_be_written(mbc):
    Path("file").touch()
    done = mbc("compile", "tiny.mbc", *FP64, "--dump-stages", "file")
    assert done.code == 1 and not Path("tiny").exists()
    assert "error MBC187: cannot write stages to 'file': File exists" in done.err


def test_a_package_in_the_place_of_a_module_is_refused_before_planning(mbc, monkeypatch):
    monkeypatch.setattr("mbc.planner.search", None)
    for name, whose in (("os", "a module of Python"), ("numpy", "an installed package"), ("torch", "an installed")):
        done = mbc("compile", "tiny.mbc", *FP64, "-o", name)
        assert done.code == 1
        assert f"error MBC099: a package called '{name}' would hide {whose}" in done.err
        assert not Path(name).exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/", "error MBC093: '/' exists and was not made by mbc\nhelp: choose another output folder with -o"),
        ("..", "error MBC093: '..' exists and was not made by mbc"),
        ("tiny.mbc", "error MBC093: 'tiny.mbc' exists and was not made by mbc"),
        ("tiny.mbc/net", "error MBC094: cannot write 'tiny.mbc/net': Not a directory"),
        ("/proc/net_of_mbc", "error MBC094: cannot write '/proc/net_of_mbc': No such file or directory"),
        ("n" * 300, "': File name too long"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_planning(mbc, monkeypatch, output, message):
    monkeypatch.setattr("mbc.planner.search", None)
    done = mbc("compile", "tiny.mbc", *FP64, "-o", output)
    assert done.code == 1 and message in done.err
    assert not list(Path().glob(".*mbc-*"))


def test_a_keyword_as_a_name_is_pointed_out(mbc):
    assert "Python cannot import a folder called 'class'" in mbc("compile", "tiny.mbc", *FP64, "-o", "class").out


def test_the_current_folder(mbc, monkeypatch):
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    done = mbc("compile", "../tiny.mbc", *FP64, "-o", ".")
    assert done.code == 1 and "error MBC094: cannot write '.': " in done.err
    assert list(Path().iterdir()) == []


def test_options_of_planning_for_a_plan(mbc):
    assert mbc("compile", "tiny.mbc", *FP64).code == 0
    for command in (("show", "tiny"), ("show", "tiny/plan.json"), ("train", "tiny", "--data", "none.npz")):
        done = mbc(*command, "--set", "batch=4")
        assert done.code == 1
        assert (
            f"error MBC188: '{command[1]}' is planned already: --gpu, --set and other planning options do not change it"
            in done.err
        )


def test_a_source_that_is_not_there(mbc):
    done = mbc("compile", "nothing.mbc")
    assert done.code == 1
    assert "error MBC183: cannot read 'nothing.mbc': No such file or directory" in done.err


def test_a_source_that_is_not_text(mbc):
    Path("bytes.mbc").write_bytes(b"network \xff")
    assert "error MBC183: cannot read 'bytes.mbc': it is not UTF-8 text (byte 8)" in mbc("compile", "bytes.mbc").err


def test_verify(mbc):
    assert mbc("compile", "tiny.mbc", *FP64).code == 0
    for place in ("tiny", "tiny/plan.json"):
        done = mbc("verify", place)
        assert done.code == 0, done.err
        assert "tiny/plan.json computes what its graph says" in done.out
        assert "its source gives this graph" in done.out
        assert "peak of train: parameters" in done.out
    assert mbc("verify", "tiny", "--json").json["source_verified"] is True


def test_verify_refuses_an_edited_plan(mbc):
    assert mbc("compile", "tiny.mbc", *FP64).code == 0
    file = Path("tiny/plan.json")
    file.write_text(file.read_text().replace('"batch": 8', '"batch": 9').replace('"batch":8', '"batch":9'))
    done = mbc("verify", "tiny")
    assert done.code == 1 and "MBC113" in done.err and "changed after it was written" in done.err


def test_verify_takes_no_source(mbc):
    done = mbc("verify", "tiny.mbc")
    assert done.code == 1
    assert "error MBC185: 'tiny.mbc' is neither a plan (.json) nor a package" in done.err


def test_a_folder_that_is_no_package(mbc):
    Path("empty").mkdir()
    done = mbc("verify", "empty")
    assert done.code == 1
    assert "error MBC184: the folder 'empty' is no package: it has no plan.json" in done.err


def test_gpus(mbc):
    done = mbc("gpus")
    assert done.code == 0
    assert "NVIDIA H200" in done.out and "plan only" in done.out and "here: no GPU was found" in done.out
    said = mbc("gpus", "--json").json
    assert said["known"]["h200"]["architecture"] == "sm_90"
    overall = said["estimates"]["ratios"]["all"]
    assert f"half have an error below {overall['error']:.0%}, nine in ten below {overall['error_high']:.0%}" in done.out
    assert f"fitted to {said['estimates']['fitted_to']}" in done.out


def test_figures_of_a_gpu(mbc):
    shown = mbc("gpus", "RTX 3060").out
    assert shown.startswith("NVIDIA GeForce RTX 3060 (rtx-3060), sm_86\n")
    assert re.search(r"^multiprocessors +28 +TechPowerUp GPU Database", shown, re.MULTILINE)
    assert "peak in fp32: 12.7 TFLOP/s (published: 12.7, NVIDIA Ampere GA102" in shown
    row = mbc("gpus", "rtx-3060", "--json").json
    assert row["multiprocessors"] == 28 and "planning" not in row
    assert "error MBC070: several GPUs are called 'A100'" in mbc("gpus", "A100").err


def test_limits_of_a_gpu_in_plans(mbc):
    """The limits are those of the planner. A dash stands for tf32 and bf16 on GPUs that lack them."""
    shown = mbc("gpus", "t4").out
    assert re.search(r"^memory_gb +16 GiB ", shown, re.MULTILINE)
    for line in (r"memory +14\.8 GiB", "copies +260 GB/s", r"fp32 +8\.10 TFLOP/s", "tf32 +-", "bf16 +-", "fp16 +65.*"):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    assert re.search(r"^tf32 +62\.5 TFLOP/s$", mbc("gpus", "a10").out, re.MULTILINE)
    assert "peak in fp16, tensor cores: -\n" in mbc("gpus", "k80").out
    rows = {line.split()[0]: line for line in mbc("gpus").out.split("\n\n")[0].splitlines()}
    assert re.search(r"260 GB/s +65\.0 TFLOP/s +datasheet$", rows["t4"]) and "125 TFLOP/s" in rows["a10"]
    assert "error MBC070: this machine has no GPU that 'auto' could mean" in mbc("gpus", "auto").err


def test_figures_of_a_pose_and_of_a_part(mbc):
    shown = mbc("gpus", "H200@sm_75").out
    assert shown.startswith("NVIDIA H200@sm_75 (h200@sm_75), sm_75\n")
    assert re.search(r"^shared memory +64\.0 KiB a block$.*^bf16 +-$", shown, re.MULTILINE | re.DOTALL)
    assert mbc("gpus", "h200@sm_75", "--json").json["name"] == "NVIDIA H200@sm_75", "no file has a pose"
    Path("card.json").write_text(mbc("gpus", "rtx-3060", "--json").out)
    shown = mbc("gpus", "card.json@8@sm_80").out
    assert shown.startswith("NVIDIA GeForce RTX 3060@8@sm_80 (card.json@8@sm_80), sm_80\n")
    assert re.search(r"^multiprocessors +28$.*^multiprocessors +8$", shown, re.MULTILINE | re.DOTALL)
    assert "error MBC288" in mbc("gpus", "t4@sm_80").err and "did you mean t4@sm_80?" in mbc("gpus", "t4@sm80").err
    assert "'a@b/card.json' is not a part of a GPU" in mbc("gpus", "a@b/card.json").err


def test_a_card_of_ones_own(mbc):
    """The plan has the figures of the card, because no list has them."""
    row = mbc("gpus", "rtx-3060", "--json").json
    Path("card.json").write_text(json.dumps(row | {"name": "Mine", "multiprocessors": 30}))
    shown = mbc("gpus", "card.json").out
    assert shown.startswith("Mine (card.json), sm_86\n") and re.search(r"^multiprocessors +30$", shown, re.MULTILINE)
    assert "peak in fp32: 13.6 TFLOP/s (published: 12.7)\n" in shown and "TechPowerUp" not in shown
    assert mbc("gpus", "card.json", "--json").json["multiprocessors"] == 30
    assert "error MBC069: the datasheet 'none.json' cannot be used" in mbc("gpus", "none.json").err
    done = mbc("compile", "tiny.mbc", "-o", "net", "--gpu", "card.json")
    assert done.code == 0 and "for Mine (sm_86)" in done.out
    target = json.loads(Path("net/plan.json").read_text())["target"]
    assert target["sheet"]["multiprocessors"] == target["multiprocessors"] == 30
    assert mbc("verify", "net").code == 0 and mbc("show", "net").code == 0
    assert mbc("compile", "tiny.mbc", "-o", "listed", "--gpu", "rtx-3060-8gb").code == 0
    assert json.loads(Path("listed/plan.json").read_text())["target"]["sheet"]["memory_bytes"] < 8 << 30
    assert mbc("compile", "tiny.mbc", "-o", "first", "--gpu", "rtx-3060").code == 0
    assert "sheet" not in json.loads(Path("first/plan.json").read_text())["target"]


def test_estimates_have_a_range(mbc):
    figures = mbc("compile", "tiny.mbc", "-o", "net", "--gpu", "a100-40", "--json").json
    for program in ("train", "infer"):
        low, time, high = (figures[f"{program}{end}_us"] for end in ("_low", "", "_high"))
        assert low < time < high
    shown = mbc("compile", "tiny.mbc", "-o", "net", "--gpu", "a100-40", "--force").out
    assert f" ({show_range(figures['train_low_us'], figures['train_high_us'])})\n  times      estimated\n" in shown
    assert f" ({show_range(figures['infer_low_us'], figures['infer_high_us'])})\n  launches " in shown
    totals = mbc("diff", "tiny.mbc", "--gpu", "a100-40", "--gpu", "t4", "--json").json["totals"]
    assert totals["train_high_us"]["before"] == figures["train_high_us"] < totals["train_high_us"]["after"]


def test_old_gpus_are_for_plans(mbc):
    done = mbc("compile", "tiny.mbc", "-o", "net", "--gpu", "k80")
    assert done.code == 0
    assert "missing    code for this GPU (plan only: the CUDA toolkit generates no" in done.out
    assert "nvcc" not in done.out
    assert mbc("show", "net").code == 0
    assert mbc("diff", "net", "tiny.mbc", "--gpu", "t4").code == 0


def test_doctor_names_missing_parts_and_their_consequences(mbc):
    done = mbc("doctor")
    assert done.code == 0
    assert "ok       mbc" in done.out
    for part in ("driver", "GPU", "nvcc", "g++", "CUDA runtime", "cuDNN", "cuBLASLt"):
        assert f"missing  {part}" in done.out
    assert "run on the CPU" in done.out and "get it: " in done.out
    for part in ("NCCL", "mpi4py", "launcher"):
        assert re.search(rf"^(ok|missing)  +{part} ", done.out, re.MULTILINE)
    findings = json.loads(mbc("doctor", "--json").out)["findings"]
    assert all(bool(f["remedy"]) == bool(f["cost"]) == (f["found"] is None) for f in findings)


def test_faults_beyond_force_are_reported_before_an_existing_package(mbc):
    assert mbc("compile", "tiny.mbc", "--gpu", "h200").code == 0
    assert "error MBC070: unknown GPU 'h900'" in mbc("compile", "tiny.mbc", "--gpu", "h900").err
    assert "error MBC021: --set bacth: " in mbc("compile", "tiny.mbc", "--gpu", "h200", "--set", "bacth=9").err
    assert "error MBC093" in mbc("compile", "tiny.mbc", "--gpu", "h200", "--set", "batch=9").err
