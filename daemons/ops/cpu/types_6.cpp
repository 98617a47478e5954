#include "type_kernels.h"

const TypeKernels q6_k = KERNELS<Q6_K>;
const TypeKernels iq4_xs = KERNELS<IQ4_XS>;
