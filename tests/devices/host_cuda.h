// Enough of CUDA to compile and run kernels on the host: threads of a block one after the other,
// which is right for kernels whose threads don't meet.
struct Place { unsigned x; };
static thread_local Place threadIdx, blockIdx, blockDim;
// A GPU faults where one isn't aligned; here it is counted.
static int misaligned = 0;
struct uint4 {
    unsigned char bytes[16];
    uint4& operator=(const uint4& other) {
        const auto places = reinterpret_cast<unsigned long long>(this)
            | reinterpret_cast<unsigned long long>(&other);
        misaligned += places % 16 != 0;
        __builtin_memcpy(bytes, other.bytes, 16);
        return *this;
    }
};
extern "C" int misaligned_vectors() { return misaligned; }
#define __global__
#define __device__

template <typename Kernel, typename Bucket>
void run_blocks(Kernel kernel, int blocks, int threads, const long long* table, Bucket* bucket) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < unsigned(blocks); ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < unsigned(threads); ++threadIdx.x) {
            kernel(table, bucket);
        }
    }
}
