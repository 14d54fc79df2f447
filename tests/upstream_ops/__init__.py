"""Runs ExecuTorch's tests of MLX operations through etkv's delegate: ``python -m tests.upstream_ops``.

The wheel's ``executorch/backends/mlx/test/test_ops.py`` registers classes of tests. Each class has configurations,
and each configuration creates a model, its inputs and torch's outputs. ExecuTorch exports the model and runs it on a
Mac. Here the same code exports it (:mod:`.export_worker`), etkv's delegate runs it (:mod:`.run_worker`), and the
wheel's function compares the outputs, at the tolerances of the test.

Exports are kept in ``build/upstream_ops/``, in a folder for each configuration, until the wheel or the code that
creates them changes. ``expected.json`` lists the configurations that do not pass, with reasons.
"""
