// Equal pieces of a matrix for all blocks: the chunks of all slabs of tiles are one line.
#pragma once

#include "tiles.cuh"

// A warp's ring of tiles: chunks of one after the other, then those of the tile `next_slab` bytes behind.
struct SlabRing {
  const u8* from;  // of the next chunk to copy
  long long next_slab;
  u32 units, barriers, slot, parity;
  int in_slab, length, left;  // chunks until the next slab, of a slab, all

  // Starts to copy `left` chunks.
  DEVICE SlabRing(const u8* from, long long next_slab, int in_slab, int length, int left, u32 units, u32 barriers, int lane)
      : from(from), next_slab(next_slab), units(units), barriers(barriers), slot(0), parity(0), in_slab(in_slab),
        length(length), left(left) {
    if (lane == 0) {
      for (int i = 0; i < DEPTH; i++) init_barrier(barriers + 8 * i);
      publish_barriers();
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DEPTH; i++) copy(i, lane);
  }

  DEVICE void copy(u32 to, int lane, u32 zero = 0) {
    if (left <= 0) return;
    if (lane == 0) copy_bulk<KIND::BYTES>(units + to * KIND::BYTES + zero, from, barriers + 8 * to);
    left--;
    from += KIND::BYTES;
    if (--in_slab == 0) {
      from += next_slab;
      in_slab = length;
    }
  }

  // The address of the oldest chunk, once it is there.
  DEVICE u32 wait() const {
    wait_for_barrier(barriers + 8 * slot, parity);
    return units + slot * KIND::BYTES;
  }

  // Copies another chunk over the oldest one, which is in registers: `loaded` is made of a word of each load.  The address depends
  // on it, as a copy might overtake loads that are on their way: of blocks side by side no compiler sees that z is 0.
  DEVICE void release(int lane, u32 loaded) {
    __syncwarp();
    copy(slot, lane, loaded & blockIdx.z);
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Equal pieces of n units.  32 bits are enough, and a division of 64 takes a tenth of a microsecond.
struct Line {
  u32 n, n_blocks;

  DEVICE int begin(u32 block) const { return (int)(block * n / n_blocks); }
  DEVICE int block_of(u32 unit) const { return (int)(((unit + 1) * n_blocks - 1) / n); }
};
