// A ring of SLOTS chunks of activations, BYTES each, that several warps share: each says when it needs the oldest one no more,
// the first one copies.
#pragma once

#include "ptx.cuh"

template <int BYTES, int SLOTS> struct Stream {
  const u8 *next, *first, *end;
  int left, step;  // chunks not copied yet; from one to the next
  u32 units, full, empty, slot, parity;

  // Starts at `next`, with every `step`-th chunk up to `end`, from where it goes on with `first`, until it has had `count`.
  DEVICE Stream(const u8* next, const u8* first, const u8* end, int step, int count, u32 units, u32 barriers)
      : next(next), first(first), end(end), left(count), step(step), units(units), full(barriers), empty(barriers + 8 * SLOTS),
        slot(0), parity(0) {}

  // Of one thread, before any other call, and a barrier of the warps.
  DEVICE void init(int n_warps) {
    for (int i = 0; i < SLOTS; i++) {
      init_barrier(full + 8 * i);
      init_barrier(empty + 8 * i, n_warps);
    }
  }

  // Of that thread
  DEVICE void fill() {
    for (int i = 0; i < SLOTS && left > 0; i++) copy(i);
  }

  DEVICE u32 wait() const {
    wait_for_barrier(full + 8 * slot, parity);
    return units + slot * BYTES;
  }

  // Of one lane of a warp; `copies`: it is the first warp's, which copies over the unit before, so as to wait for no other warp long.
  DEVICE void release(bool copies, bool has_before) {
    arrive(empty + 8 * slot);
    if (copies && has_before && left > 0) {
      u32 before = slot ? slot - 1 : SLOTS - 1;
      wait_for_barrier(empty + 8 * before, slot ? parity : parity ^ 1);
      copy(before);
    }
  }

  DEVICE void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }

 private:
  DEVICE void copy(u32 to) {
    copy_bulk<BYTES>(units + to * BYTES, next, full + 8 * to);
    next += (long long)step * BYTES;
    if (next >= end) next = first;
    left--;
  }
};
