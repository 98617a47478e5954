// The entry points for attention over pages that daemons/ops/cpu/library.py calls.
#include <vector>

#include "page_writes.h"
#include "paged_attention.h"
#include "recorded.h"

extern "C" {

long paged_attention(const PagedAttention* a) {
  static thread_local std::vector<Line> memory;
  switch (a->keys.kind) {
    case 0: a->run<0>(memory); break;
    case 1: a->run<1>(memory); break;
    case 2: a->run<2>(memory); break;
    default: a->run<3>(memory);
  }
  return 0;
}

long write_pages(const Pages* pages, const int64_t* slots, const uint16_t* rows, long stride, long n_rows) {
  write_rows(*pages, slots, rows, stride, n_rows);
  return 0;
}

RECORDED(paged_attention)
RECORDED(write_pages)
}
