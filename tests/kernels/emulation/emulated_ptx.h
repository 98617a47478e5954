// Takes the place of daemons/ops/cuda/ptx.cuh: a thread of a block is a fiber on the cpu, its instructions are plain C++.
//
// Fibers run in a random order from one meeting point (barrier, shuffle, matrix product) to the next, warps stand still now and
// then, and a copy happens at its start, or not before the wait for it, some of them long after that began, so that a
// missing wait or barrier shows as wrong numbers.  Shared memory begins
// as NaN.  The blocks of a cluster take turns.  Blocks in which all threads wait for ever end the process with a message.
#define PTX_CUH
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <random>
#include <vector>
#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Dim3 { u32 x, y, z; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

#define DEVICE inline
#define __global__
#define __shared__
#define __align__(n)
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#ifndef NO_BULK_COPIES
#define BULK_COPIES
#endif
#define WIDE_PRODUCTS

alignas(128) u8 memory[1 << 18];  // shared memory of the block that runs

// ---- fibers

constexpr int STACK_BYTES = 1 << 16;
struct Copy { u32 to; const u8* from; u32 n_bytes; };
struct Store { u8* to; u32 from, n_bytes; bool read; std::vector<u8> bytes; };
struct Product { float (*c)[4]; int n; u32 a[32][4]; u64 b; bool adds; };
struct Meeting { int arrived = 0, generation = 0; };
struct Barrier { u32 parity, n_arrivals, missing; bool pending; Copy copy; u64 lands_at; int bytes; };
struct Sent { u32 to; float4 value; u32 barrier; };
struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  bool done;
  std::vector<std::vector<Copy>> groups;  // copies that are not there yet, the last group still open
  std::vector<Store> stores;              // that are not read or not there yet
  std::vector<std::vector<Product>> products;  // groups that are not there yet, the last one still open
  int cluster_generation;
};
struct Block {
  std::vector<u8> memory;  // while another block runs
  std::vector<Barrier> barriers;  // by address over 8
  std::vector<Fiber> fibers;
  std::vector<Sent> sent;  // to this block, and not there yet
  Meeting of_block, of_teams[32], of_warps[32];
  u32 exchanged[32][2][32][6];  // [warp][parity][lane]: a warp can be one meeting ahead only
};
static std::vector<Block> blocks;  // of the cluster that runs
static Block* block;
static Meeting of_cluster;
static ucontext_t scheduler;
static int running;
static std::mt19937 random_bits;
static u64 n_sweeps;  // over the fibers of a block, so far
static u64 moves;  // meetings that were passed and copies that were made: none in a sweep is a deadlock
static Dim3 threadIdx, blockIdx, gridDim, blockDim;

static void yield() {
  int self = running;
  swapcontext(&block->fibers[self].context, &scheduler);
}

static bool arrive(Meeting& m, int n) {
  moves++;
  if (++m.arrived < n) return false;
  m.arrived = 0;
  m.generation++;
  return true;
}

static void meet(Meeting& m, int n) {
  int generation = m.generation;
  if (!arrive(m, n))
    while (m.generation == generation) yield();
}

template <class F> static void meet_warp(F&& put) {
  int warp = threadIdx.x / 32;
  put(block->exchanged[warp][block->of_warps[warp].generation % 2][threadIdx.x % 32]);
  meet(block->of_warps[warp], 32);
}
static u32 (&what_was_put())[32][6] {
  int warp = threadIdx.x / 32;
  return block->exchanged[warp][(block->of_warps[warp].generation + 1) % 2];
}

static void __syncthreads() { meet(block->of_block, blockDim.x); }
static void __syncwarp() { meet_warp([](u32*) {}); }

template <int N> static void wait_for_team(int team) { meet(block->of_teams[team], N); }

static void arrive_in_cluster() {
  block->fibers[running].cluster_generation = of_cluster.generation;
  arrive(of_cluster, (int)blocks.size() * blockDim.x);
}
static void arrive_in_cluster_relaxed() { arrive_in_cluster(); }
static void wait_for_cluster() {
  while (of_cluster.generation == block->fibers[running].cluster_generation) yield();
}

// ---- CUDA's own functions

static u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
static float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return d;
}
static int __shfl_sync(u32, int value, int lane) {
  meet_warp([&](u32* slot) { slot[0] = (u32)value; });
  return (int)what_was_put()[lane][0];
}
static u32 __shfl_xor_sync(u32, u32 value, int mask) {
  meet_warp([&](u32* slot) { slot[0] = value; });
  return what_was_put()[(threadIdx.x % 32) ^ mask][0];
}
static float __shfl_xor_sync(u32 members, float value, int mask) {
  return __uint_as_float(__shfl_xor_sync(members, __float_as_uint(value), mask));
}
static u32 __reduce_max_sync(u32, u32 value) {
  meet_warp([&](u32* slot) { slot[0] = value; });
  u32 largest = 0;
  for (auto& slot : what_was_put()) largest = max(largest, slot[0]);
  return largest;
}

// ---- arithmetic

static float half_at(u32 word, int i) {
  u16 bits = (u16)(word >> (16 * i));
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
static u32 halves(double low, double high) {
  _Float16 h[2] = {(_Float16)low, (_Float16)high};
  u32 word;
  memcpy(&word, h, 4);
  return word;
}
static u32 fma_half2(u32 a, u32 b, u32 c) {
  return halves((double)half_at(a, 0) * half_at(b, 0) + half_at(c, 0), (double)half_at(a, 1) * half_at(b, 1) + half_at(c, 1));
}
static u32 add_half2(u32 a, u32 b) { return halves((double)half_at(a, 0) + half_at(b, 0), (double)half_at(a, 1) + half_at(b, 1)); }
static u32 mul_half2(u32 a, u32 b) { return halves((double)half_at(a, 0) * half_at(b, 0), (double)half_at(a, 1) * half_at(b, 1)); }
static u32 pack_half2(float low, float high) { return halves(low, high); }
static u32 both_low(u32 a) { return __byte_perm(a, a, 0x1010); }
static u32 both_high(u32 a) { return __byte_perm(a, a, 0x3232); }
static float low_float(u32 a) { return half_at(a, 0); }
static float high_float(u32 a) { return half_at(a, 1); }
static u16 to_float16(float v) { return (u16)halves(v, 0); }
static u16 to_bfloat16(float v) {
  u32 u = __float_as_uint(v);
  return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (u16)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
template <u32 MASK> static u32 and_or(u32 a, u32 b) { return (a & MASK) | b; }
static float reciprocal(float v) { return 1.f / v; }
static u32 in_register(u32 value) { return value; }

static void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  meet_warp([&](u32* s) { s[0] = a0, s[1] = a1, s[2] = a2, s[3] = a3, s[4] = b0, s[5] = b1; });
  auto& put = what_was_put();
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < 16; k++) {
      u32 a = put[g * 4 + k % 8 / 2][i / 2 + k / 8 * 2], b = put[(2 * t + i % 2) * 4 + k % 8 / 2][4 + k / 8];
      sum += (double)half_at(a, k % 2) * half_at(b, k % 2);
    }
    c[i] = (float)sum;
  }
}

// The products of a fiber's lane are computed when they are waited for: who reads sums earlier finds what was there.
static u64 second_half(u64 b, int shift) { return (b >> shift & 0x3FFF) << 4; }
static void compute(const Product& p) {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4 * p.n; i++) {
    int row = i % 4 / 2, column = 2 * t + i % 2;
    double sum = p.adds ? p.c[i / 4][i % 4] : 0;
    for (int k = 0; k < 16; k++) {
      u32 word;
      u64 at = second_half(p.b, 0) + k / 8 * second_half(p.b, 16) + i / 4 * second_half(p.b, 32) + column * 16 + k % 8 / 2 * 4;
      memcpy(&word, memory + at, 4);
      sum += (double)half_at(p.a[g * 4 + k % 8 / 2][row + k / 8 * 2], k % 2) * half_at(word, k % 2);
    }
    p.c[i / 4][i % 4] = (float)sum;
  }
}
template <int N> static void start_product(float (&c)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int adds) {
  meet_warp([&](u32* s) { s[0] = a0, s[1] = a1, s[2] = a2, s[3] = a3; });
  Product p = {c, N, {}, b, adds != 0};
  for (int lane = 0; lane < 32; lane++) memcpy(p.a[lane], what_was_put()[lane], sizeof(p.a[lane]));
  auto& groups = block->fibers[running].products;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(p);
}
static void publish_registers() {}
static void end_products() { block->fibers[running].products.emplace_back(); }
template <int PENDING> static void wait_for_products() {
  auto& groups = block->fibers[running].products;
  while (groups.size() > PENDING + 1) {
    for (auto& p : groups.front()) compute(p);
    groups.erase(groups.begin());
  }
}
template <int N> static void keep_in_order(float (&)[N][4]) {}

static int this_warp() { return (int)threadIdx.x / 32; }

// ---- shared memory and copies

static u32 shared_address(const void* p) { return (u32)((const u8*)p - memory); }
template <class T> static T load_shared(u32 at) {
  T v;
  memcpy(&v, memory + at, sizeof(T));
  return v;
}
static int add_shared(int* at, int value) { return (*at += value) - value; }
static uint4 load_shared16(u32 at) { return load_shared<uint4>(at); }
static uint2 load_shared8(u32 at) { return load_shared<uint2>(at); }
static u32 load_shared4(u32 at) { return load_shared<u32>(at); }
static u32 load_shared2(u32 at) { return load_shared<u16>(at); }

static void make(const Copy& c) {
  memcpy(memory + c.to, c.from, c.n_bytes);
  moves++;
}

static void copy_async16(u32 to, const u8* from) {
  auto& groups = block->fibers[running].groups;
  if (groups.empty()) groups.emplace_back();
  if (random_bits() % 2) make({to, from, 16});
  else groups.back().push_back({to, from, 16});
}
static void end_copy_group() {
  auto& groups = block->fibers[running].groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
template <int PENDING> static void wait_for_copies() {
  auto& groups = block->fibers[running].groups;
  while (groups.size() > PENDING + 1) {
    for (auto& c : groups.front()) make(c);
    groups.erase(groups.begin());
  }
}

static Barrier& barrier_at(u32 address) { return block->barriers[address / 8]; }
static void init_barrier(u32 barrier, u32 n_arrivals = 1) { barrier_at(barrier) = {0, n_arrivals, n_arrivals, false, {}, 0, 0}; }
static void publish_barriers() {}
static void complete(Barrier& b) {
  if (b.missing || b.pending || b.bytes) return;
  b.missing = b.n_arrivals;
  b.parity ^= 1;
  moves++;
}
static void land(Barrier& b) {
  make(b.copy);
  b.pending = false;
  complete(b);
}
static void arrive(u32 barrier) {
  Barrier& b = barrier_at(barrier);
  b.missing--;
  complete(b);
}
static void expect_bytes(u32 barrier, int n_bytes) {
  barrier_at(barrier).bytes += n_bytes;
  arrive(barrier);
}
static bool receive(u32 barrier) {
  auto& sent = block->sent;
  for (auto one = sent.begin(); one != sent.end(); ++one) {
    if (one->barrier != barrier) continue;
    memcpy(memory + one->to, &one->value, sizeof(one->value));
    barrier_at(barrier).bytes -= (int)sizeof(one->value);
    sent.erase(one);
    moves++;
    complete(barrier_at(barrier));
    return true;
  }
  return false;
}
template <int BYTES> static void copy_bulk(u32 to, const u8* from, u32 barrier) {
  Barrier& b = barrier_at(barrier);
  b.copy = {to, from, BYTES};
  b.pending = true;
  b.missing--;
  b.lands_at = n_sweeps + (random_bits() % 8 ? 0 : random_bits() % 200);
  if (random_bits() % 2 && b.lands_at <= n_sweeps) land(b);
}
static void wait_for_barrier(u32 barrier, u32 parity) {
  Barrier& b = barrier_at(barrier);
  while (b.parity == parity) {
    if (b.pending && b.lands_at <= n_sweeps) {
      land(b);
    } else if (!receive(barrier)) {
      if (b.pending) moves++;
      yield();
    }
  }
}

static void publish_writes() {}
static void read(Store& s) {
  if (!s.read) s.bytes.assign(memory + s.from, memory + s.from + s.n_bytes);
  s.read = true;
  moves++;
}
static void write(Store& s) {
  read(s);
  memcpy(s.to, s.bytes.data(), s.n_bytes);
}
template <int BYTES> static void store_bulk(u8* to, u32 from) {
  block->fibers[running].stores.push_back({to, from, BYTES, false, {}});
  if (random_bits() % 2) read(block->fibers[running].stores.back());
}
static void wait_until_stores_have_read() {
  for (auto& s : block->fibers[running].stores) read(s);
}
static void wait_for_stores() {
  for (auto& s : block->fibers[running].stores) write(s);
  block->fibers[running].stores.clear();
}

template <class T> static void store_in_cluster(u32 at, u32 rank, T value) {
  memcpy((block == &blocks[rank] ? memory : blocks[rank].memory.data()) + at, &value, sizeof(T));
}

static void send_in_cluster(u32 at, u32 rank, float4 value, u32 barrier) {
  blocks[rank].sent.push_back({at, value, barrier});
  moves++;
}

static void launch_dependents() {}
static void wait_for_inputs() {}

// ---- running a block

static void (*kernel_of_fiber)();

static void fiber_main() {
  kernel_of_fiber();
  block->fibers[running].done = true;
  moves++;
  swapcontext(&block->fibers[running].context, &scheduler);
}

static void prepare_block(Block& b, int n_threads) {
  b.memory.assign(sizeof(memory), 0xFF);
  b.barriers.assign(sizeof(memory) / 8, {0, 1, 1, false, {}, 0, 0});
  b.sent.clear();
  b.of_block = {};
  for (auto* meetings : {b.of_teams, b.of_warps}) std::fill(meetings, meetings + 32, Meeting{});
  b.fibers.resize(n_threads);
  for (auto& f : b.fibers) {
    f.stack.resize(STACK_BYTES);
    f.done = false;
    f.groups.clear();
    f.stores.clear();
    f.products.clear();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f.context, fiber_main, 0);
  }
}

// One turn of each of the current block's fibers but those of the warp that stands still; whether all are done.
static bool sweep(std::vector<int>& order, int still) {
  bool all_done = true;
  n_sweeps++;
  std::shuffle(order.begin(), order.end(), random_bits);
  for (int i : order) {
    Fiber& f = block->fibers[i];
    if (f.done) continue;
    all_done = false;
    if (i / 32 == still) continue;
    running = i;
    threadIdx = {(u32)i, 0, 0};
    swapcontext(&scheduler, &f.context);
  }
  return all_done;
}

static void run_grid(int grid_x, int grid_y, int n_threads, int seed, void (*kernel)(), int cluster = 1) {
  random_bits.seed(seed);
  kernel_of_fiber = kernel;
  gridDim = {(u32)grid_x, (u32)grid_y, 1};
  blockDim = {(u32)n_threads, 1, 1};
  blocks.resize(cluster);
  std::vector<int> order(n_threads);
  for (int i = 0; i < n_threads; i++) order[i] = i;
  for (int first = 0; first < grid_x * grid_y; first += cluster) {
    of_cluster = {};
    for (auto& b : blocks) prepare_block(b, n_threads);
    int still = 0, sweeps = 0;  // the warp that stands still, for how many sweeps over all fibers
    for (bool all_done = false; !all_done; sweeps--) {
      all_done = true;
      u64 before = moves;
      if (sweeps <= 0) still = random_bits() % (n_threads / 32), sweeps = random_bits() % 100;
      for (int i = 0; i < cluster; i++) {
        block = &blocks[i];
        blockIdx = {(u32)((first + i) % grid_x), (u32)((first + i) / grid_x), 0};
        memcpy(memory, block->memory.data(), sizeof(memory));
        u64 at_begin;
        do {
          at_begin = moves;
          all_done &= sweep(order, sweeps > 0 ? still : -1);
        } while (cluster > 1 && moves != at_begin && random_bits() % 64);
        memcpy(block->memory.data(), memory, sizeof(memory));
      }
      if (!all_done && moves == before && sweeps <= 0) {
        fprintf(stderr, "deadlock in block (%u, %u)\n", blockIdx.x, blockIdx.y);
        abort();
      }
    }
  }
}
