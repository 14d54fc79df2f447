extern __shared__ uint4 shared_memory[];
etkv::Attention<Element, DK, DV, MASK, STAGES, ROW_WARPS> work;
work.q = {q, q_strides[1], q_strides[2], q_strides[3]};
work.k = {k, k_strides[1], k_strides[2], k_strides[3]};
work.v = {v, v_strides[1], v_strides[2], v_strides[3]};
work.sizes = {q_shape[1] / k_shape[1], q_shape[2], k_shape[2]};
work.scale = __int_as_float(SCALE) * etkv::LOG2_E;
work.shared = reinterpret_cast<char*>(shared_memory);
