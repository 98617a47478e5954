// Loops over threads, where these pay.
#pragma once
#include <omp.h>

// Calls body(i) for i from 0 to n, on several threads if that `pays`; DYNAMIC if some take longer than others.  A region
// of OpenMP takes up to a microsecond with one thread, too: as long as half of a step's calls take for one row.
template <bool DYNAMIC = false, class Body>
inline void parallel_for(bool pays, long n, const Body& body) {
  if (!pays || omp_get_max_threads() == 1) {
    for (long i = 0; i < n; i++) body(i);
  } else if (DYNAMIC) {
#pragma omp parallel for schedule(dynamic)
    for (long i = 0; i < n; i++) body(i);
  } else {
#pragma omp parallel for
    for (long i = 0; i < n; i++) body(i);
  }
}
