#include "type_kernels.h"

const TypeKernels q5_0 = KERNELS<Q5_0>;
const TypeKernels q5_1 = KERNELS<Q5_1>;
const TypeKernels q8_0 = KERNELS<Q8_0>;
