"""Runs ExecuTorch's own tests of MLX operations through the delegate: ``python -m tests.upstream_ops``.

The wheel's ``executorch/backends/mlx/test/test_ops.py`` registers classes of tests. Each class has configurations, and
each configuration makes a model, its inputs and the outputs that torch computes. ExecuTorch exports the model and runs
it on a Mac. Here the same code exports it (:mod:`.export_worker`), the delegate runs it (:mod:`.run_worker`), and the
wheel's own function compares, at the tolerances of the test.

The exports stay in ``build/upstream_ops/``, one folder a configuration, until the wheel or the code that makes them
changes. ``expected.json`` lists the configurations that do not pass, with reasons.
"""
