"""The command line: sentences instead of traces, exit code 2, no torch, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vissl_zero import __version__, cli
from vissl_zero.cli import WORDS, main
from vissl_zero.config.programs import PROGRAMS

QUICKSTART = "config=quickstart/swav_digits"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in an empty folder; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vissl-zero"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "file").touch()
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "fails.py").write_text("\nraise OSError('a defect')")
    (tmp_path / "configs" / "config").mkdir(parents=True)
    (tmp_path / "configs" / "config" / "binary.yaml").write_bytes(b"\xff\xfe")

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            [],
            "must name a recipe. Write config=<recipe>. First: config=quickstart/swav_digits; vissl-zero list recipes",
        ),
        (["config=quickstart/swav_digit"], "Did you mean config=quickstart/swav_digits?"),
        ([QUICKSTART, "config.ZERO.LEVL=1"], "config.ZERO.LEVL: is not a key. Did you mean 'LEVEL'?"),
        ([QUICKSTART, "config.ZERO.LEVEL=4"], "config.ZERO.LEVEL: must be auto, fit, 0, 1, 2 or 3 (got 4)."),
        ([QUICKSTART, "config.OPTIMIZER.name=zero"], "must name the optimizer that zero shards."),
        (["list", "recipe"], "must be one of recipes,"),
        (["list", "trunks", "more"], "vissl-zero list: takes no 'more'."),
        (
            ["doktor"],
            "instance_retrieval_test. Did you mean 'doctor'?",
        ),
        (["jobs", "logs", "no such job"], "vissl-zero jobs logs: no such job is not a vissl-zero job."),
        (["train", QUICKSTART], "training has no word. Write vissl-zero config=<recipe>."),
        (["jobs", "list", "more"], "takes no 'more'. Leave it out."),
        (["--config", "quickstart/swav_digits"], "must be a key, not a flag (got --config). Write config=quickstart/"),
        (["--config.ZERO.LEVEL=3", QUICKSTART], "(got --config.ZERO.LEVEL=3). Write config.ZERO.LEVEL=3."),
        ([QUICKSTART, "--config"], "(got --config). Write config=<value>."),
        ([QUICKSTART, "-m", "config.OPTIMIZER.lr=interval(0.1,0.3)"], "Add hydra/sweeper=optuna and config.OBJECTIVE="),
        ([QUICKSTART, "--dry-rum"], "--dry-rum is not a flag. Did you mean '--dry-run'"),
        ([QUICKSTART, "--cfg", "job", "-m"], "Only one of --run, --multirun, --cfg"),
        ([QUICKSTART, "--cfg", "job", "--package", "config.ZEROO"], "package 'config.ZEROO' not found"),
        ([QUICKSTART, "--config-path", "elsewhere"], "Use --config-dir instead."),
        (["-sc", "install=tcsh"], "No completion plugin for 'tcsh'"),
        (["config=binary"], "binary.yaml: must be a recipe that can be read ('utf-8' codec can't decode byte 0xff"),
        (["config=/tmp/recipe.yaml"], "Put it in configs/config/ and write config=recipe."),
        (["config=recipe.yaml", "config.SEED_VALUE=1"], "Put it in configs/config/ and write config=recipe."),
        (["config=/tmp/recipe"], "A recipe is named by its path under a folder config/"),
        ([QUICKSTART, "hydra.searchpath=[file:///no]"], "hydra.searchpath: must name folders that exist (got '/no')"),
        (
            [QUICKSTART, "config.CHECKPOINT.DIR=file/run"],
            "config.CHECKPOINT.DIR: must name a folder, and a file is there (got 'file/run')",
        ),
        (
            [QUICKSTART, "config.CHECKPOINT.DIR=file"],
            "config.CHECKPOINT.DIR: must name a folder, and a file is there (got 'file')",
        ),
        ([QUICKSTART, "hydra.job.chdir=true"], "hydra.job.chdir: must be false: the paths of a recipe are relative"),
        ([QUICKSTART, "config.CHECKPOINT.DIR="], "config.CHECKPOINT.DIR: must name a folder (got '')."),
        ([QUICKSTART, "config.CHECKPOINT.ALLOW_CHANGED=[LOS]"], "must name keys or blocks (got 'LOS'). Did you mean"),
        (
            [QUICKSTART, "config.SEED_VALUE=${oc.env:NOT_SET_HERE}"],
            "needs the environment variable NOT_SET_HERE, which",
        ),
        ([QUICKSTART, "config.IMPORTS=[leaves]"], "It ends with SystemExit: 0 at "),
        ([QUICKSTART, "config.IMPORTS=[fails]"], "/fails.py, line 2. Correct the module."),
        ([QUICKSTART, "config.IMPORTS=['../x']"], "Write a module as an import statement does"),
        ([QUICKSTART, "hydra/launcher=nope"], "must name a configuration file that exists"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(command, words, text):
    code, out, err = command(*words)
    assert code == 2
    assert out == ""
    assert text in err
    assert err.count("\n") == 1
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.fixture
def vissl(tmp_path: Path) -> Path:
    """A checkout of VISSL, as far as its recipes go."""
    path = tmp_path / "vissl" / "configs" / "config" / "pretrain" / "swav" / "swav_8node_resnet.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nconfig: {SEED_VALUE: 43}\n")
    return tmp_path / "vissl"


@pytest.mark.parametrize(
    ("level", "recipe"),
    [
        (".", "pretrain/swav/swav_8node_resnet"),
        ("configs/config", "pretrain/swav/swav_8node_resnet"),
        ("configs/config", "mistyped"),
    ],
)
def test_config_dir_at_the_wrong_level_says_the_right_one(command, vissl, level, recipe):
    code, _, err = command("--config-dir", str(vissl / level), f"config={recipe}")
    assert code == 2 and err.count("\n") == 1
    assert f"Write --config-dir {vissl / 'configs'}." in err


def test_recipes_of_config_dir_are_known(command, vissl):
    folder = str(vissl / "configs")
    code, _, err = command("--config-dir", folder, "config=pretrain/swav/swav_8node_resnett")
    assert code == 2 and "config=pretrain/swav/swav_8node_resnet" in err
    for words in (["recipes", "--config-dir", folder], [f"--config-dir={folder}", "recipes"]):
        code, out, _ = command("list", *words)
        assert code == 0 and out.startswith("config=pretrain/swav/swav_8node_resnet ")
    assert "must name a folder that exists" in command("list", "recipes", "--config-dir", "nowhere")[2]


@pytest.mark.parametrize(
    "word", ["plan", "explain", "verify", "lr-find", "data bench", "checkpoint import w --to w.st"]
)
def test_every_command_that_takes_a_recipe_takes_config_dir(command, vissl, word):
    folder = vissl / "configs"
    (folder / "config" / "mine.yaml").write_text("# @package _global_\nconfig: {SEED_VALUE: nought}\n")
    said = "".join(command(*word.split(), "config=mine", "--config-dir", str(folder))[1:])
    assert "config.SEED_VALUE: must be a whole number" in said
    _, _, err = command(*word.split(), "config=mine", "--config-dir=nowhere")
    assert err == "--config-dir: must name a folder that exists (got 'nowhere'). Correct the path.\n"


def test_plan_prints_a_command_that_finds_the_recipe_of_config_dir(command, vissl):
    folder = vissl / "configs"
    text = "# @package _global_\ndefaults: [/config/quickstart/swav_digits]\n"
    (folder / "config" / "mine.yaml").write_text(text)
    code, out, _ = command("plan", "config=mine", "--config-dir", str(folder), "--ranks", "2")
    assert code == 0 and f"hydra.searchpath=[file://{folder}]" in out.replace("'", "")


@pytest.mark.parametrize("part", ["zero/fsdp", "zero/oss", "benchmark/data/folder"])
def test_a_part_alone_is_told_that_it_is_one(command, part):
    group, _, file = part.rpartition("/")
    assert command(f"config={part}") == (
        2,
        "",
        f"config: must name a complete recipe, and this is a part of one (got '{part}'). "
        f"Add it to a recipe: vissl-zero config=<recipe> +config/{group}={file}.\n",
    )


def test_a_trunk_with_heads_alone_is_told_that_it_is_a_part(command, vissl):
    file = vissl / "configs" / "config" / "benchmark" / "models" / "resnet50.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\nconfig: {MODEL: {TRUNK: {NAME: resnet}, HEAD: {PARAMS: [[mlp, {dims: [2048, 1000]}]]}}}\n"
    )
    code, _, err = command("--config-dir", str(vissl / "configs"), "config=benchmark/models/resnet50")
    assert code == 2 and err.count("\n") == 1
    assert "this is a part of one" in err
    assert "config=<recipe> +config/benchmark/models=resnet50." in err


def test_a_refused_dry_run_leaves_nothing(command, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert command("config=pretrain/swav/my_photos", "--dry-run")[0] == 2
    words = ("config.CHECKPOINT.DIR=a/new/folder", "--dry-run")
    assert command("config=pretrain/swav/my_photos", *words)[0] == 2
    assert sorted(tmp_path.iterdir()) == before


def test_who_asks_for_the_trace_gets_it(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, _, err = command(QUICKSTART, "config.ZERO.LEVL=1")
    assert code == 2 and "Traceback" in err and err.endswith("config.ZERO.LEVL: is not a key. Did you mean 'LEVEL'?\n")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_all_problems_at_once(command):
    code, _, err = command(QUICKSTART, "config.ZERO.LEVEL=4", "config.LOSS.name=nope", "config.TRAINER.DTYPE=int8")
    assert code == 2
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "config.TRAINER.DTYPE",
        "config.LOSS.name",
        "config.ZERO.LEVEL",
    ]


def test_a_mistake_leaves_no_folder_behind(command, tmp_path):
    assert command(QUICKSTART, "config.ZERO.LEVEL=4")[0] == 2
    assert list(tmp_path.glob("runs/*")) == []
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        assert command(QUICKSTART, "config.ZERO.LEVEL=4", f"config.CHECKPOINT.DIR={name}")[0] == 2
    assert not (tmp_path / "new").exists() and (tmp_path / "mine").exists()


def test_one_bad_job_of_a_sweep_hides_no_other(command):
    code, out, err = command("-m", QUICKSTART, "config.ZERO.LEVEL=8,9")
    assert code == 2
    assert "Launching 2 jobs locally" in out
    assert [line for line in err.splitlines() if "(got 8)" in line or "(got 9)" in line] == err.splitlines()


def test_a_mistyped_key_in_a_sweep(command):
    code, _, err = command("-m", QUICKSTART, "config.ZERO.LEVL=1,2")
    assert code == 2
    assert "config.ZERO.LEVL: is not a key." in err
    assert "Traceback" not in err


def test_composed_configuration_is_shown(command):
    code, out, err = command(QUICKSTART, "config.SEED_VALUE=41", "--cfg", "job")
    assert (code, err) == (0, "")
    assert "SEED_VALUE: 41" in out


def test_flags_may_stand_anywhere(command):
    code, out, err = command("--cfg", "job", QUICKSTART, "--package", "config.ZERO", "config.ZERO.LEVEL=1")
    assert (code, err) == (0, "")
    assert "LEVEL: 1" in out


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("vissl-zero config=quick", "config=quickstart/swav_digits"),
        ("vissl-zero config=quickstart/swav_digits config.ZERO.L", "config.ZERO.LEVEL="),
        ("vissl-zero +config/zero=f", "+config/zero=fsdp"),
    ],
)
def test_completion(command, monkeypatch, line, choices):
    monkeypatch.setenv("COMP_LINE", line)
    assert command("-sc", "query=bash") == (0, f"{choices}\n", "")


def test_several_recipes_are_one_run(command):
    code, _, err = command("config=[quickstart/swav_digits,zero/sdp]", "config.ZERO.LEVEL=4")
    assert code == 2 and "(got 4)" in err


@pytest.mark.slow
def test_a_glob_of_recipes(command):
    code, out, err = command("-m", "config=glob(*digits)", "config.ZERO.LEVEL=8")
    assert code == 2 and err.count("(got 8)") == 2
    assert "config=quickstart/swav_digits" in out and "config=supervised/digits" in out
    code, _, err = command("-m", "config=glob(nothing*)")
    assert (code, err) == (
        2,
        "command line: must make a job: nothing is swept, or a glob() matches nothing. See vissl-zero list recipes.\n",
    )


def test_a_dry_sweep_starts_and_leaves_nothing(command, tmp_path):
    words = ("-m", QUICKSTART, "config.ZERO.LEVEL=8,9", "hydra/launcher=submitit_slurm", "--dry-run")
    code, _, err = command(*words)
    assert code == 2 and "(got 8)" in err and "(got 9)" in err
    assert list(tmp_path.glob("runs/*")) == []


def test_a_home_folder_is_not_made_here(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command(QUICKSTART, "config.CHECKPOINT.DIR='~/run'", "config.ZERO.LEVEL=4")[0] == 2
    assert not (tmp_path / "~").exists()


def test_python_runs_the_package() -> None:
    run = [sys.executable, "-m", "vissl_zero", "--version"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[-1]) == (0, __version__), done.stderr


@pytest.mark.parametrize(("word", "text"), [("--help", "Train:"), ("--version", __version__), ("-h", "Exit codes:")])
def test_words_about_the_program(command, word, text):
    code, out, _ = command(word)
    assert code == 0
    assert text in out


def test_help_beside_a_recipe_is_the_help(command):
    assert command(QUICKSTART, "--help") == command("--help") == (0, cli.HELP, "")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("recipes", "config=quickstart/swav_digits"), ("trunks", "regnet"), ("engines", "torch"), ("sources", "digits")],
)
def test_lists(command, kind, name):
    code, out, _ = command("list", kind)
    assert code == 0
    assert name in out
    assert any(line.startswith(name) and line.rstrip().endswith(".") for line in out.splitlines())  # one line each


def run_python(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_a_reader_that_has_enough(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    code = 'import sys; from vissl_zero.cli import main; sys.exit(main(["--help"]))'
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_error_imports_no_torch(tmp_path):
    code = f"""
import sys
from vissl_zero.cli import main
assert main(["{QUICKSTART}", "config.ZERO.LEVEL=4", "config.MACHINE.DEVICE=gpu"]) == 2
assert main(["list", "losses"]) == 0
heavy = {{"torch", "torchvision", "classy_vision", "sklearn", "numpy"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchvision_imports_after_vissl_zero_also_where_it_failed_before(tmp_path):
    code = """
import sys
try:
    import torchvision
except RuntimeError as error:
    assert "nms does not exist" in str(error)
import vissl_zero, torchvision
assert torchvision.models.resnet18(num_classes=3).fc.out_features == 3
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_no_deprecation_warning(tmp_path):
    code = f'from vissl_zero.cli import main; assert main(["{QUICKSTART}", "--cfg", "job"]) == 0'
    done = run_python(code, tmp_path, PYTHONWARNINGS="error::DeprecationWarning,error::UserWarning")
    assert done.returncode == 0, done.stderr


def test_other_ranks_under_torchrun_leave_no_folder(tmp_path):
    code = f'from vissl_zero.cli import main; assert main(["{QUICKSTART}", "config.ZERO.LEVEL=4"]) == 2'
    done = run_python(code, tmp_path, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_tool_is_the_same_entry(tmp_path):
    tool = ROOT / "tools" / "run_distributed.py"
    done = subprocess.run(
        [sys.executable, str(tool), "config=nope"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("config: must name a recipe (got 'nope').")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_recipes_from_other_folders(command, tmp_path, where):
    folder = tmp_path / "elsewhere"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "theirs.yaml").write_text("# @package _global_\nconfig: {SEED_VALUE: 43}\n")
    code, out, err = command("config=theirs", where.format(folder), "--cfg", "job")
    assert (code, err) == (0, "")
    assert "SEED_VALUE: 43" in out


COMMANDS = [*WORDS, *PROGRAMS, "jobs list", "jobs logs", "jobs cancel", "checkpoint inspect", "checkpoint export"]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*command.split(), flag]) == 0
    except SystemExit as end:  # argparse
        assert end.code == 0
    said = capsys.readouterr().out
    assert f"vissl-zero {command.split()[0]}" in said and not said.startswith("vissl-zero: large vision models")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config-name", "quickstart/swav_digits"], "Write config=quickstart/swav_digits."),
        (["config=digits/swav", "config.OPTIMIZER.lr", "=", "0.1"], "Write config.OPTIMIZER.lr=<value>"),
        (["config=digits/swav", "config.OPTIMIZER.lr", "=0.1"], "Write config.OPTIMIZER.lr=0.1;"),
        (["config=digits/swav", "config.OPTIMIZER.lr=0,1"], "config.OPTIMIZER.lr: must be one value, and commas"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_to_the_point(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("has_srun", [False, True])
def test_a_sweep_that_slurm_does_not_take_is_one_sentence(command, tmp_path, monkeypatch, has_srun):
    """Of submitit's launcher, which is not ours: without SLURM, and with an sbatch that refuses."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("srun", "sbatch") if has_srun else ():
        (binaries / name).write_text("#!/bin/sh\necho 'invalid partition specified: nope' >&2\nexit 1\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/bin" if has_srun else str(binaries))
    code, _, err = command("-m", QUICKSTART, "config.SEED_VALUE=0,1", "hydra/launcher=submitit_slurm")
    why = "invalid partition specified: nope" if has_srun else 'Could not detect "srun"'
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith(f"hydra/launcher: SLURM takes no job of the sweep ({why}")
    assert "Traceback" not in err
