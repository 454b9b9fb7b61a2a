/* Batch normalisation of float32 on one thread of a CPU. cpu_kernels.py calls these functions;
 * kernels.py says what they compute.
 *
 * Input, gradients and output are contiguous and have the shape (rows, channels, size). Statistics
 * are the means of all channels, then their biased variances. Weight and bias may be NULL.
 */

#include <math.h>
#include <stddef.h>

/* GCC compiles such a function for several vector widths; which one runs is chosen at load time. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

typedef ptrdiff_t Size;

const int instep_kernels_interface = 1; /* changes with any function's parameters */

/* Of each channel the mean, then of each the sum of squared distances from it. */
FOR_EACH_PROCESSOR
void instep_moments(
    const float *restrict input, Size rows, Size channels, Size size,
    double *restrict moments)
{
    double *mean = moments, *squares = moments + channels;
    const double count = (double)rows * size;
    for (Size c = 0; c < channels; c++) {
        /* Distances from one of the values: the difference of squares loses no more digits than
         * count has. */
        const double center = isfinite(input[c * size]) ? input[c * size] : 0;
        double sum = 0, sum_of_squares = 0;
        for (Size r = 0; r < rows; r++) {
            const float *restrict x = input + (r * channels + c) * size;
            for (Size i = 0; i < size; i++) {
                double distance = x[i] - center;
                sum += distance;
                sum_of_squares += distance * distance;
            }
        }
        mean[c] = center + sum / count;
        squares[c] = sum_of_squares - sum / count * sum;
    }
}

/* The statistics of all rows, and how many values a channel has, from the moments of each shard:
 * a row of what instep_moments gives and the number of values in a channel. */
FOR_EACH_PROCESSOR
double instep_merge(
    const double *restrict moments, Size shards, Size channels, double *restrict statistics)
{
    double *mean = statistics, *var = statistics + channels;
    const Size row = 2 * channels + 1;
    double total = 0;
    for (Size s = 0; s < shards; s++)
        total += moments[s * row + 2 * channels];
    for (Size c = 0; c < channels; c++) {
        double weighted = 0, squares = 0;
        for (Size s = 0; s < shards; s++)
            weighted += moments[s * row + 2 * channels] * moments[s * row + c];
        mean[c] = weighted / total;
        for (Size s = 0; s < shards; s++) {
            double offset = moments[s * row + c] - mean[c];
            squares += moments[s * row + channels + c]
                + moments[s * row + 2 * channels] * offset * offset;
        }
        var[c] = squares / total;
    }
    return total;
}

/* Move `running` towards `values` * `correction`. */
void instep_update_running(
    float *restrict running, const double *restrict values, Size channels,
    double correction, double momentum)
{
    for (Size c = 0; c < channels; c++)
        running[c] += momentum * (values[c] * correction - running[c]);
}

/* (input - mean) / sqrt(var + eps) * weight + bias. */
FOR_EACH_PROCESSOR
void instep_normalize(
    const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    const float *restrict weight, const float *restrict bias, float *restrict output)
{
    const double *mean = statistics, *var = statistics + channels;
    for (Size c = 0; c < channels; c++) {
        const double slope = (weight ? weight[c] : 1) / sqrt(var[c] + eps);
        const float scale = slope, offset = (bias ? bias[c] : 0) - mean[c] * slope;
        for (Size r = 0; r < rows; r++) {
            const float *restrict x = input + (r * channels + c) * size;
            float *restrict y = output + (r * channels + c) * size;
            for (Size i = 0; i < size; i++)
                y[i] = x[i] * scale + offset;
        }
    }
}

/* Of each channel the sums of grad * x_hat and of grad, as `sums` and once more in float32. */
FOR_EACH_PROCESSOR
void instep_sums(
    const float *restrict grad, const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    double *restrict sums, float *restrict weight_grad, float *restrict bias_grad)
{
    const double *mean = statistics, *var = statistics + channels;
    for (Size c = 0; c < channels; c++) {
        const double center = mean[c];
        double dot = 0, total = 0;
        for (Size r = 0; r < rows; r++) {
            const float *restrict g = grad + (r * channels + c) * size;
            const float *restrict x = input + (r * channels + c) * size;
            for (Size i = 0; i < size; i++) {
                dot += g[i] * (x[i] - center);
                total += g[i];
            }
        }
        sums[c] = dot / sqrt(var[c] + eps);
        sums[channels + c] = total;
        weight_grad[c] = sums[c];
        bias_grad[c] = total;
    }
}

/* scale * (grad - avg(grad) - x_hat * avg(grad * x_hat)), with `sums` over all `count` values of a
 * channel. */
FOR_EACH_PROCESSOR
void instep_input_grad(
    const float *restrict grad, const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    const float *restrict weight, const double *restrict sums, double count,
    float *restrict output)
{
    const double *mean = statistics, *var = statistics + channels;
    for (Size c = 0; c < channels; c++) {
        const double inv_std = 1 / sqrt(var[c] + eps);
        const double slope = (weight ? weight[c] : 1) * inv_std;
        const double of_input = -slope * inv_std * sums[c] / count;
        const float scale = slope, factor = of_input;
        const float offset = -slope * sums[channels + c] / count - of_input * mean[c];
        for (Size r = 0; r < rows; r++) {
            const float *restrict g = grad + (r * channels + c) * size;
            const float *restrict x = input + (r * channels + c) * size;
            float *restrict y = output + (r * channels + c) * size;
            for (Size i = 0; i < size; i++)
                y[i] = g[i] * scale + (x[i] * factor + offset);
        }
    }
}
