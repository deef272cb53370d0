"""Weights as a quantized model holds them once loaded: which modules each method replaces, and by which tensors.

For a linear layer of `n` inputs, `m` outputs, groups or blocks of `g`; b is a byte, h the 16-bit float of the model:

| method             | tensors of one linear layer                                        | source                     |
|--------------------|--------------------------------------------------------------------|----------------------------|
| int8               | weight i1[m, n], SCB f4[m]                                         | bitsandbytes Int8Params    |
| nf4, fp4           | weight u1[m·n/2, 1], absmax f4[m·n/64], quant_map f4[16]           | bitsandbytes Params4bit    |
| … double quantized | absmax u1[m·n/64], nested_absmax f4[m·n/64/256],                   | bitsandbytes QuantState    |
|                    | nested_quant_map f4[256], nested_offset f4                         |                            |
| gptq               | qweight i4[n·bits/32, m], qzeros i4[n/g, m·bits/32],               | gptqmodel, AutoGPTQ        |
|                    | scales f2[n/g, m], g_idx i4[n]                                     |                            |
| awq                | qweight i4[n, m·bits/32], qzeros i4[n/g, m·bits/32],               | AutoAWQ WQLinear_GEMM      |
|                    | scales f2[n/g, m]                                                  |                            |
| fp8, mxfp8         | weight e4m3[m, n], weight_scale_inv f4[m/g, n/g] (e8m0: 1 byte)    | transformers FP8Linear     |
| fbgemm_fp8         | weight e4m3[m, n], weight_scale f4[m, 1], input_scale_ub f4[1]     | transformers FbgemmFp8…    |
| compressed-tensors | weight e4m3 or i1[m, n], or weight_packed i4[m, n·bits/32] with    | compressed-tensors formats |
|                    | weight_shape i8[2]; weight_scale h; fp4 kinds as the next two      |                            |
| modelopt NVFP4     | weight u1[m, n/2], weight_scale e4m3[m, n/16], weight_scale_2 f4,  | NVIDIA ModelOpt exports    |
|                    | input_scale f4                                                     |                            |
| modelopt FP8       | weight e4m3[m, n], weight_scale f4, input_scale f4                 | NVIDIA ModelOpt exports    |
| mxfp4 (gpt-oss)    | of the experts: u1[e, m, n/2], scales u1[e, m, n/32], biases f4    | transformers Mxfp4…Experts |

Embeddings, norms, output heads and whatever a method skips stay as they are. Experts that are one three-dimensional
parameter are replaced only where transformers does so: by fp8 and mxfp4. bitsandbytes, GPTQ and AWQ leave them as they
are, and compressed-tensors unpacks them while loading.
"""
