//! Uninitialised memory for kernels that write every number, so that it need not be zeroed first.

use std::mem::MaybeUninit;

/// A number that may be uninitialised.
pub(crate) type Unset = MaybeUninit<f32>;

/// A vector of `len` numbers, initialised by `write`.
///
/// # Safety
/// `write` must write every element.
#[expect(
    unsafe_code,
    reason = "the caller promises that every element was written"
)]
pub(crate) unsafe fn made(len: usize, write: impl FnOnce(&mut [Unset])) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(len);
    write(&mut numbers.spare_capacity_mut()[..len]);
    unsafe { numbers.set_len(len) };
    numbers
}

/// Views numbers as memory to write to. The code that receives it must write only initialised numbers.
pub(crate) fn of(numbers: &mut [f32]) -> &mut [Unset] {
    let numbers: *mut [f32] = numbers;
    #[expect(
        unsafe_code,
        reason = "same layout; the kernels of this crate write only initialised numbers"
    )]
    unsafe {
        &mut *(numbers as *mut [Unset])
    }
}
