#include "type_kernels.h"

const TypeKernels q4_k = KERNELS<Q4_K>;
const TypeKernels q5_k = KERNELS<Q5_K>;
