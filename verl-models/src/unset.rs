//! Memory that is written before it is read: kernels that write every number need no zeros there first.

use std::mem::MaybeUninit;

/// A number that may not be there yet.
pub(crate) type Unset = MaybeUninit<f32>;

/// `len` numbers that `write` writes.
///
/// # Safety
/// `write` writes every element.
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

/// Numbers as memory that is written to. What takes it must write numbers alone.
pub(crate) fn of(numbers: &mut [f32]) -> &mut [Unset] {
    let numbers: *mut [f32] = numbers;
    #[expect(
        unsafe_code,
        reason = "same layout; the kernels of this crate write numbers alone"
    )]
    unsafe {
        &mut *(numbers as *mut [Unset])
    }
}
