"""Zip archives that are the same whenever they are made from the same files."""
import zipfile
from collections.abc import Collection, Mapping
from io import BytesIO

TIME = (1980, 1, 1, 0, 0, 0)        # of every file


def pack(files: Mapping[str, str | bytes], programs: Collection[str]) -> bytes:
    """Return a zip of files, by name; `programs` names those that can be executed."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = (0o755 if name in programs else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return data.getvalue()
