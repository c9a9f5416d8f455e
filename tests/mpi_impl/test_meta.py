"""Arrays without data take the memory that NumPy's would, and refuse what depends on data.

That their shapes, formats and views are NumPy's is what dry runs are compared with (test_dry_run.py).
"""
import gc

import numpy as np
import pytest

from shardlab.predict.meta import prototype
from shardlab.predict.meta_device import MetaDevice


def test_memory_is_counted_while_it_lives():
    """A view keeps the whole array; the peak has the lines that made what lived."""
    device = MetaDevice()
    x = np.zeros_like(prototype(device), shape=(100, 10), dtype=np.float32)
    row = x[3]
    y = x + 1
    assert device.live == 8000
    del x, y
    gc.collect()
    assert device.live == 4000 and device.most().size == 8000
    del row
    assert device.live == 0
    peak = device.most()
    assert sum(peak.sites.values()) == peak.size == 8000
    assert {site.line.partition(":")[0] for site in peak.sites} == {"tests/mpi_impl/test_meta.py"}


def test_what_depends_on_data_is_refused():
    """A mask's count and a truth are not known; a count of ids is taken for even."""
    x = np.zeros_like(prototype(MetaDevice()), shape=(2, 5), dtype=np.int64)
    with pytest.raises(TypeError, match="depends on data"):
        x[x > 0]
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(x.sum())
    with pytest.raises(TypeError):
        np.linalg.svd(x)
    assert np.diff(np.searchsorted(x.reshape(-1), np.arange(5, like=x))).get().tolist() == [3, 3, 2, 2]
    assert x.sum().item() == 0 and x.get().shape == (2, 5)
