"""Imports the modules of all tests, as pytest does when it collects them."""

import sys

import pytest

if pytest.main(["--collect-only", "-n", "0", "-p", "no:terminal", "-p", "no:cacheprovider"]):
    # pytest keeps a module that fails, and would take it for whole. The processes that run the
    # tests import all of them again, and report the error.
    for name in [name for name in sys.modules if ".test_" in name]:
        del sys.modules[name]
