// A ring of SLOTS units in shared memory that one warp fills for itself, with every `step`-th of a sequence of units that
// comes in runs.  No other warp waits for it.  From sm_90 on a unit is one bulk copy that completes on an mbarrier, before that 16 bytes a lane.
//
// RUNS says where runs lie: length(i) units of run i, which begin at start(i).
#pragma once

#include "ptx.cuh"

// Runs of equal length at equal distances
struct EvenRuns {
  const u8* first;
  int n_units;
  long long distance;

  DEVICE const u8* start(int i) const { return first + i * distance; }
  DEVICE int length(int) const { return n_units; }
};

template <int SLOTS, int BYTES, class RUNS> struct Ring {
  static constexpr int BARRIER_BYTES = 8 * SLOTS;
  RUNS runs;
  const u8* run;  // of the next unit to copy
  int left;       // units not copied yet
  int i, at, length, step;  // the next one's run, its place there, units of the run
  u32 units, barriers, slot, parity;

  // Starts to copy, from unit `at` on, `count` units.  units, barriers: this warp's SLOTS units and barriers in shared memory.
  DEVICE Ring(const RUNS& runs, int at, int step, int count, u32 units, u32 barriers)
      : runs(runs), run(runs.start(0)), left(count), i(0), at(at), length(runs.length(0)), step(step), units(units),
        barriers(barriers), slot(0), parity(0) {
    skip_runs();
#ifdef BULK_COPIES
    if ((threadIdx.x & 31) == 0) {
      for (int i = 0; i < SLOTS; i++) init_barrier(barriers + 8 * i);
      publish_barriers();
    }
    __syncwarp();
#endif
#pragma unroll
    for (int i = 0; i < SLOTS; i++) copy(i);
  }

  // Starts to copy `count` units from the first one on; all before were released.
  DEVICE void restart(int count) {
    run = runs.start(0);
    left = count;
    i = at = 0;
    length = runs.length(0);
    for (int i = 0; i < SLOTS; i++) copy((slot + i) % SLOTS);
  }

  // The address of the oldest unit, once it is there.
  DEVICE u32 wait() {
#ifdef BULK_COPIES
    wait_for_barrier(barriers + 8 * slot, parity);
#else
    wait_for_copies<SLOTS - 1>();
    __syncwarp();
#endif
    return units + slot * BYTES;
  }

  // No lane needs the oldest unit any more: copies another one over it.
  DEVICE void release() {
    __syncwarp();
    copy(slot);
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }

 private:
  DEVICE void skip_runs() {
    if (at < length || left <= 0) return;
    while (at >= length) {
      at -= length;
      length = runs.length(++i);
    }
    run = runs.start(i);
  }

  DEVICE void copy(u32 to) {
    int lane = threadIdx.x & 31;
    if (left > 0) {
      const u8* from = run + at * BYTES;
#ifdef BULK_COPIES
      if (lane == 0) copy_bulk<BYTES>(units + to * BYTES, from, barriers + 8 * to);
#else
      for (int at = 16 * lane; at < BYTES; at += 512) copy_async16(units + to * BYTES + at, from + at);
#endif
      at += step;
      left--;
      skip_runs();
    }
#ifndef BULK_COPIES
    end_copy_group();  // empty ones too: they are counted
#endif
  }
};
