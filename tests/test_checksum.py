"""Checksums tell whether all ranks summed the same, in every dtype and at any number of ranks."""

import subprocess
import sys

import pytest
import torch

from instep.errors import MixedSumsError
from instep.training.buckets.checksum import bucket_checksum, verify_checksum

DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.complex64]
ERROR = MixedSumsError.of_models()


def added(dtype, *meant):
    """The sum of the marks of so many ranks."""
    total = bucket_checksum(torch.empty(0, dtype=dtype), *meant[0])
    for other in meant[1:]:
        total = total + bucket_checksum(total, *other)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_ones_add_up_to_no_error(dtype):
    verify_checksum(added(dtype, *[(3, 0, 1)] * 3000), ERROR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1234, 2999])
def test_one_other_among_thousands_is_an_error(dtype, place):
    meant = [(3, 0, 1)] * 3000
    meant[place] = (3, 0, 2)
    with pytest.raises(MixedSumsError, match="another rank"):
        verify_checksum(added(dtype, *meant), ERROR)


ON_A_GPU = """
import sys
sys.path.append("tests")
import torch
from test_checksum import ERROR, bucket_checksum, verify_checksum

like = torch.empty(0, device="cuda")
verify_checksum(bucket_checksum(like, 1) + bucket_checksum(like, 1), ERROR)
torch.cuda.synchronize()
verify_checksum(bucket_checksum(like, 1) + bucket_checksum(like, 2), ERROR)
print("nobody has waited")
torch.cuda.synchronize()
print("nothing has happened")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
def test_on_a_gpu_nobody_waits_and_the_device_asserts_it():
    ran = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode != 0
    assert ran.stdout == "nobody has waited\n"
    assert str(ERROR) in ran.stderr
