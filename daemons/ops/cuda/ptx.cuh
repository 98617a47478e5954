// Single PTX instructions: arithmetic on pairs of float16, matrix units, shared memory, asynchronous copies, launches.
// No other file has any.  It includes nothing, so that NVRTC compiles it without a CUDA installation.
#ifndef PTX_CUH
#define PTX_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// ---- pairs of float16 in a word

DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

DEVICE u32 add_half2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 mul_half2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 pack_half2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

DEVICE u32 both_low(u32 a) { return __byte_perm(a, a, 0x1010); }
DEVICE u32 both_high(u32 a) { return __byte_perm(a, a, 0x3232); }

DEVICE float low_float(u32 a) {
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(a));
  return f;
}

DEVICE float high_float(u32 a) {
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(a));
  return f;
}

DEVICE u16 to_float16(float v) {
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return d;
}

DEVICE u16 to_bfloat16(float v) {
  u16 d;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return d;
}

// Within one unit in the last place.
DEVICE float reciprocal(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// (a & MASK) | b in one instruction: b has to be in a register, or the compiler splits it in two.
template <u32 MASK> DEVICE u32 and_or(u32 a, u32 b) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
  return d;
}

DEVICE u32 in_register(u32 value) {
  u32 d;
  asm volatile("mov.b32 %0, %1;" : "=r"(d) : "r"(value));
  return d;
}

// ---- matrix units: c [16, 8] += a [16, 16] b [16, 8].  Lane 4 g + t holds rows g and g + 8 of a at columns 2 t, + 1 (a0,
// a1) and 2 t + 8, + 9 (a2, a3), the same columns of b's column g (b0, b1), and columns 2 t, + 1 of c's rows.

DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- matrix units of four warps (sm_90a): they read the second factor from shared memory, once for 64 rows of the first.
// Products pass while the warps go on, until they wait for them.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WIDE_PRODUCTS
#endif

#ifdef WIDE_PRODUCTS
// c [64, 8 N] (+)= a [64, 16] b [16, 8 N]: each warp has 16 rows of a and c as above, c[n] for columns 8 n and on.  b: where the
// second factor lies (see wide.cuh).
#define SUMS_OF(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
template <int N> DEVICE void start_product(float (&c)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int adds) {
  static_assert((1 <= N && N <= 4) || N == 8 || N == 16);
  if constexpr (N == 1)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, "
        "%5, %6, %7}, %8, p, 1, 1, 0;}"
        : SUMS_OF(0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
  else if constexpr (N == 2)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
        "%5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : SUMS_OF(0), SUMS_OF(1)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
  else if constexpr (N == 3)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %17, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
        "%5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, p, 1, 1, 0;}"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
  else if constexpr (N == 4)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
        "%5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
  else if constexpr (N == 8)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
        "%5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
        "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
        "%5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
        "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7),
          SUMS_OF(8), SUMS_OF(9), SUMS_OF(10), SUMS_OF(11), SUMS_OF(12), SUMS_OF(13), SUMS_OF(14), SUMS_OF(15)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
}
#undef SUMS_OF

// Registers are as they were written: before products that read them.
DEVICE void publish_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Products started so far are a group.
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are not there.
template <int PENDING> DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Not read before the wait above, nor written after the start of what follows.
template <int N> DEVICE void keep_in_order(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
#endif

// ---- a block's warps

// Which one this is.  The compiler sees that it is one number for all lanes, and computes what follows from it once.
DEVICE int this_warp() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

// ---- shared memory

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE uint4 load_shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

DEVICE uint2 load_shared8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

DEVICE u32 load_shared4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

DEVICE u32 load_shared2(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}

// What was there.
DEVICE int add_shared(int* at, int value) { return atomicAdd(at, value); }

// Waits for the other warps of a team of N threads; `team` < 15.
template <int N> DEVICE void wait_for_team(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(N) : "memory"); }

// ---- asynchronous copies of 16 bytes from global to shared memory, awaited in the order of their groups

DEVICE void copy_async16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are not there.
template <int PENDING> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- bulk copies (sm_90), awaited on an mbarrier: of one arrival, or of as many as are to say that a place is free

#if __CUDA_ARCH__ >= 900 && !defined(NO_BULK_COPIES)
#define BULK_COPIES
#endif

#ifdef BULK_COPIES
DEVICE void init_barrier(u32 barrier, u32 n_arrivals = 1) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}

// An arrival, and `n_bytes` that others are to store.
DEVICE void expect_bytes(u32 barrier, int n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}

DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Barriers are seen by other threads and by the copy engine.
DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int BYTES> DEVICE void copy_bulk(u32 to, const u8* from, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "n"(BYTES), "r"(barrier)
               : "memory");
}

// This thread's writes to shared memory are seen by the copy engine.
DEVICE void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts to copy from shared to global memory.
template <int BYTES> DEVICE void store_bulk(u8* to, u32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "n"(BYTES) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until shared memory that this thread's stores read may be written, and until all that they write is there.
DEVICE void wait_until_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

DEVICE void wait_for_barrier(u32 barrier, u32 parity) {
  asm volatile("{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE:}" ::"r"(
                   barrier),
               "r"(parity)
               : "memory");
}
#endif

// ---- clusters (sm_90): blocks that reach each other's shared memory, once all have arrived for the first time

#if __CUDA_ARCH__ >= 900
DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// The same where nothing of what this thread wrote or read has to be there: it waits for no store.
DEVICE void arrive_in_cluster_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores to the address `at` of block `rank`.
DEVICE void store_in_cluster(u32 at, u32 rank, float4 value) {
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};}" ::"r"(at),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// Sends 16 bytes to the address `at` of block `rank`, whose `barrier` expects them.
DEVICE void send_in_cluster(u32 at, u32 rank, float4 value, u32 barrier) {
  asm volatile(
      "{.reg .u32 there, counted; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 counted, %6, %1; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [counted];}" ::"r"(at),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
#endif

// ---- programmatic dependent launch (sm_90): a kernel may start before the one ahead of it ended, up to its wait

DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
