// A ring of SLOTS units in shared memory that one warp fills for itself, with every STEP-th of a sequence of units that
// comes in runs.  No other warp waits for it.  From sm_90 on a unit is one bulk copy that completes on an mbarrier, before that 16 bytes a lane.
#pragma once

#include "ptx.cuh"

template <int SLOTS, int BYTES, int STEP> struct Ring {
  static constexpr int BARRIER_BYTES = 8 * SLOTS;
  const u8* next;  // to copy
  int left;        // units not copied yet
  int at, length;  // the next one's place in its run, units of a run
  long long gap;   // bytes between the end of a run and the next run
  u32 units, barriers, slot, parity;

  // Starts to copy, from unit `at` of the run at `run` on, `count` units.  units, barriers: this warp's SLOTS units and
  // barriers in shared memory.
  DEVICE Ring(const u8* run, int at, int length, long long gap, int count, u32 units, u32 barriers)
      : next(run + at * BYTES), left(count), at(at), length(length), gap(gap), units(units), barriers(barriers), slot(0),
        parity(0) {
    skip_gaps();
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
  DEVICE void skip_gaps() {
    while (at >= length) {
      at -= length;
      next += gap;
    }
  }

  DEVICE void copy(u32 to) {
    int lane = threadIdx.x & 31;
    if (left > 0) {
#ifdef BULK_COPIES
      if (lane == 0) copy_bulk<BYTES>(units + to * BYTES, next, barriers + 8 * to);
#else
      for (int at = 16 * lane; at < BYTES; at += 512) copy_async16(units + to * BYTES + at, next + at);
#endif
      next += STEP * BYTES;
      at += STEP;
      skip_gaps();
      left--;
    }
#ifndef BULK_COPIES
    end_copy_group();  // empty ones too: they are counted
#endif
  }
};
