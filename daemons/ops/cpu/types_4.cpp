#include "type_kernels.h"

const TypeKernels q4_0 = KERNELS<Q4_0>;
const TypeKernels q4_1 = KERNELS<Q4_1>;
const TypeKernels iq4_nl = KERNELS<IQ4_NL>;
const TypeKernels mxfp4 = KERNELS<MXFP4>;
