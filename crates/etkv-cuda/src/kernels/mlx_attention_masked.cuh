const int rows_axis = mask_ndim - 2, keys_axis = mask_ndim - 1;
work.marks = {
    mask, mask_shape[rows_axis] == 1 ? 0 : mask_strides[rows_axis],
    mask_shape[keys_axis] == 1 ? 0 : mask_strides[keys_axis]};
