# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper GPUs, in Gluon: attention's forward pass, and its backward pass in one kernel.

Read `docs/kernels.md` first for the design, with pictures and measurements. Then `backward_kernel` and
`forward_kernel`: each begins with a table of its barriers. After them, in this order:

- backward: `backward_products` (the mathematics of a step; `backward_wide_products` for heads above 128),
  `backward_scores` (masks and options), `backward_memory`, `backward_transfers`, `backward_turns`, `turn_order`;
- forward: `forward_softmax`, `sums`, `forward_results`, `forward_positions`, `forward_transfers`;
- both: `hardware_barriers`, `head_tiles`, `layouts`, `dropout`, `workarounds`; for bits that repeat, `dq_order`;
- on the host: `family` and `plans` (which blocks the kernels take, and how), `forward` and `backward` (the launches).

Words. A *turn* is a work tile of a persistent program: a tile of queries of one head (forward) or a tile of keys of
one key head (backward). A *step* is one tile of the other side within a turn. The *producer* fetches tiles by TMA, the
*consumers*, groups of four warps, compute with them, and the *writers* of a backward program add dq to memory. A
*stage* is one of the buffers in shared memory through which the tiles of one kind pass in rotation. Programs count
turns and steps (`turns_done`, `steps_done`); the count modulo the number of stages is the stage. A tile is *masked* if
some of its pairs of query and key may be hidden, and *whole* if none is.

Constants of a launch: `F` (the call: `kernel_inputs.BlockConstants`), `T` (the table of visited tiles:
`visited_tiles.TableShape`), `PLAN` (`plans.ForwardPlan` or `plans.BackwardPlan`). `P` holds pointers to the arrays that
options need (`kernels.tokens.Inputs`). `shared` is the program's shared memory. Other names in capitals are constants
too, or arrays in global memory.
"""
