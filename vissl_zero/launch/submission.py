"""What a submitted job is read from: a copy of the code, and a folder that no other user can ever write to.

submitit unpickles what it finds in the folder, so whoever can write into it, or replace it, runs code as the user.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vissl_zero.errors import LaunchError

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def snapshot(code: Path, imports: Sequence[str]) -> None:
    """Copy vissl_zero and the top-level modules of ``imports`` into the folder ``code``, which goes on PYTHONPATH.

    Raises:
        LaunchError: it cannot be written.
    """
    try:
        shutil.rmtree(code, ignore_errors=True)
        for name in dict.fromkeys(["vissl_zero", *(module.partition(".")[0] for module in imports)]):
            spec = find_spec(name)
            if spec is None:
                continue  # said already where imports are checked
            if spec.submodule_search_locations:
                shutil.copytree(next(iter(spec.submodule_search_locations)), code / name, ignore=_LEFT_OUT)
            elif spec.origin:
                code.mkdir(parents=True, exist_ok=True)
                shutil.copy(spec.origin, code / Path(spec.origin).name)
    except OSError as error:
        raise LaunchError(f"config.SLURM.SNAPSHOT_CODE: cannot copy the code to {code} ({error.strerror}).") from error


_KEY = "config.SLURM.LOG_FOLDER"


def private_folder(path: Path) -> Path:
    """Make ``path`` with mode 0700, or check that it is safe; returns it without links.

    Raises:
        LaunchError: it, or a folder above it, is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
    except OSError as error:
        raise LaunchError(f"{_KEY}: cannot make {path} ({error.strerror}).") from error
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{_KEY}: {path} must belong to you and be private, because jobs run what they find there (it "
            f"belongs to {_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):o}). chmod 700 it, or name "
            "another folder."
        )
    for parent in path.parents:
        if culprit := _who_else_can_replace(parent.stat()):
            raise LaunchError(
                f"{_KEY}: {path} could be replaced by others, because {culprit} can write to {parent}. Name a folder "
                "elsewhere, such as ~/vissl_zero_jobs."
            )
    return path


def _who_else_can_replace(status: os.stat_result) -> str:
    """Who besides the user and root can rename what is in a folder; else an empty text."""
    if status.st_uid not in (0, os.getuid()):
        return _user(status.st_uid)
    if status.st_mode & stat.S_ISVTX:  # sticky: only owners rename
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"group {_group(status.st_gid)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """Whether the user is the only member of a group (many systems give each user a private group)."""
    if gid == 0:
        return True
    try:
        members = set(grp.getgrgid(gid).gr_mem)
        own = pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return own.pw_gid == gid and own.pw_name == grp.getgrgid(gid).gr_name and members <= {own.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
