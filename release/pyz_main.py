"""Starts `bsl.pyz`: unpacks it once into the user's cache, and runs it from there. Python 2.7 can read this file."""

import sys

OLDEST = (3, 9)
if sys.version_info < OLDEST:
    sys.stderr.write(
        "error: bsl.pyz needs Python 3.9 or newer, and this is %d.%d\n"
        "hint: name another one, such as python3.11 bsl.pyz\n" % sys.version_info[:2]
    )
    sys.exit(2)

import os
import shutil
import stat
import tempfile
import zipfile

DIGEST = "@DIGEST@"
ARCHIVE = os.path.dirname(os.path.abspath(__file__))


def unpacked():
    """Return the folder with the files of this archive; another user can have written nothing in it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "bsl", "pyz-" + DIGEST)
    if is_own(folder):
        return folder
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        part = tempfile.mkdtemp(prefix="pyz-", dir=os.path.dirname(folder))
    except OSError:
        part = tempfile.mkdtemp(prefix="bsl-pyz-")
        import atexit

        atexit.register(shutil.rmtree, part, ignore_errors=True)
        return unpack(part)
    unpack(part)
    try:
        os.rename(part, folder)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def unpack(folder):
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    for name in os.listdir(os.path.join(folder, "bin")):
        os.chmod(os.path.join(folder, "bin", name), 0o755)
    os.chmod(folder, 0o755)
    return folder


def is_own(folder):
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def main():
    folder = unpacked()
    if not is_own(folder):
        sys.stderr.write("error: %s: others may write it\nhint: remove it, and start again\n" % folder)
        sys.exit(2)
    sys.path[0] = folder
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.join(folder, "bin")])
    from bigsci_launch.cli.single_file import main as run

    run()


main()
