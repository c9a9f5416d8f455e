// The gradient of a table whose rows have been looked up (reference/ops.py: lookup_backward), on a core: one row after
// the other, since the same row may come again. A block is a row of dy.
extern "C" __global__ void lookup_backward(const element *dy, const Index *ids, number *dtable, int width) {
    Index row = blockIdx.x;
    const element *from = dy + row * width;
    number *to = dtable + ids[row] * width;
    VECTORS EACH_COLUMN(column, width) to[column] += widen(from[column]);
}
