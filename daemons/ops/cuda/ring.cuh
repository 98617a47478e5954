// A ring of SLOTS units in shared memory that one warp fills for itself, from units that lie STRIDE bytes apart.  No other
// warp waits for it.  From sm_90 on a unit is one bulk copy that completes on an mbarrier, before that 16 bytes a lane.
#pragma once

#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900 && !defined(NO_BULK_COPIES)
#define BULK_COPIES
#endif

template <int SLOTS, int BYTES, int STRIDE> struct Ring {
  static constexpr int BARRIER_BYTES = 8 * SLOTS;
  const u8* next;  // to copy
  int left;        // units not copied yet
  u32 units, barriers, slot, parity;

  // Starts to copy.  units, barriers: this warp's SLOTS units and barriers in shared memory.
  DEVICE Ring(const u8* first, int count, u32 units, u32 barriers)
      : next(first), left(count), units(units), barriers(barriers), slot(0), parity(0) {
#ifdef BULK_COPIES
    if ((threadIdx.x & 31) == 0) {
      for (int i = 0; i < SLOTS; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
#pragma unroll
    for (int i = 0; i < SLOTS; i++) copy(i);
  }

  // The address of the oldest unit, once it is there.
  DEVICE u32 wait() {
#ifdef BULK_COPIES
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE:}" ::"r"(
            barriers + 8 * slot),
        "r"(parity)
        : "memory");
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
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
  DEVICE void copy(u32 to) {
    int lane = threadIdx.x & 31;
    if (left > 0) {
#ifdef BULK_COPIES
      if (lane == 0) {
        u32 barrier = barriers + 8 * to;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         units + to * BYTES),
                     "l"(next), "n"(BYTES), "r"(barrier)
                     : "memory");
      }
#else
      for (int at = 16 * lane; at < BYTES; at += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(units + to * BYTES + at), "l"(next + at)
                     : "memory");
#endif
      next += STRIDE;
      left--;
    }
#ifndef BULK_COPIES
    asm volatile("cp.async.commit_group;" ::: "memory");  // empty ones too: they are counted
#endif
  }
};
