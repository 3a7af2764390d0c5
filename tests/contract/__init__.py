"""What every operator keeps, tested over the whole catalogue (farro.catalogue.OPERATORS).

The tests are parametrized from the operators' KERNELS, so a new kernel is tested as soon as it is
listed. A new operator needs one entry in samples, and test_catalogue.py fails until it has one.
A test named `test_scenario_NN_...` is about the fault of that number that users of similar
libraries reported: 4 strided views, 5 non-finite and tiny values, 6 empty problems, 7 padding,
9 shards, 10 tile thresholds, 12 torch.compile, 13 CUDA graphs, 14 unknown architectures, 15 import
(tests/packaging), 16 determinism and batch size, 17 no autotuning, 18 scales taken for each other;
2 and 3, the current device and stream, are in test_devices.py.
"""
