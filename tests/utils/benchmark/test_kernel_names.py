"""Names as profilers print them, from cuBLAS, cuDNN, CUTLASS, flash-attn, torch, inductor and hand-written kernels."""

from utils.benchmark.kernel_names import DOCUMENTED_KEY, FAMILIES, classify

NAMES = {
    "gemm": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align8>"
        "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align8::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>> >",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16>",
        "triton_tem_fused_mm_0",
        "triton_red_fused_mv_1",
        "gemm_tiled_kernel",
        "aten::linear",
        "cpp_fused_mm_0",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false,"
        " cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, true>",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t,"
        " cutlass::arch::Sm80, true, 64, 64, 64, true, true>::Params)",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_decoding_0",
        "_attn_fwd",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16,"
        " at::native::(anonymous namespace)::SoftMaxForwardEpilogue>",
        "triton_per_fused__softmax_2",
        "triton_red_fused__to_copy_add_prepare_softmax_online_3",
        "aten::_softmax",
    ],
    "layernorm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>",
        "triton_per_fused_rms_norm_0",
        "flashinfer::norm::RMSNormKernel",
        "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "aten::native_layer_norm",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
        " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
        "triton_poi_fused_gelu_mul_3",
        "gelu_tanh_kernel",
        "void vllm::act_and_mul_kernel<c10::BFloat16>",
        "aten::gelu",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
        "triton_red_fused_sum_0",
        "aten::mean",
    ],
    "memory": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel"
        "_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>,"
        " std::array<char*, 1ul> >",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymous"
        " namespace)::OpaqueType<2u>, unsigned int, 4, 64, 64, 16>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_put_kernel"
        "_impl<at::native::OpaqueType<2> > > >",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>",
        "void at::native::vectorized_gather_kernel<16, long>",
        "triton_poi_fused_clone_0",
        "aten::copy_",
    ],
    "other": ["void at::native::radixSortKVInPlace<2, -1, 32, 4>", "ncclDevKernel_AllGather_RING_LL", "aten::fft_rfft"],
}


def test_families():
    found = {name: (family, classify(name)) for family, names in NAMES.items() for name in names}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


def test_every_family_has_a_documented_key():
    assert set(DOCUMENTED_KEY) == set(FAMILIES)
    assert set(DOCUMENTED_KEY.values()) == {"gemm", "elementwise", "softmax", "layernorm", "memory", "other"}
