"""Subcommands of ``vissl-zero``: one file each."""
