//! The C interface; `etkv_text.h` is its documentation.

use std::ffi::{c_char, CStr, CString, OsStr};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::{ptr, slice, str};

use crate::chat::Message;
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::text::Text;

#[repr(C)]
pub struct Ids {
    data: *mut u32,
    length: usize,
}

#[repr(C)]
pub struct RawMessage {
    role: *const c_char,
    content: *const c_char,
    content_length: usize,
}

/// Runs `body`: NULL for success, else its error, or its panic, as a sentence
/// that the caller owns.
fn boundary(body: impl FnOnce() -> Result<()>) -> *mut c_char {
    // A panic leaves nothing half-changed that a caller can see: tokenizers are
    // read only, and a stream's pieces are text alone.
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return ptr::null_mut(),
        Ok(Err(error)) => error,
        Err(panic) => Error::Panic(panic_message(panic.as_ref())),
    };
    let sentence = error.to_string().replace('\0', "\u{fffd}");
    CString::new(sentence).unwrap_or_default().into_raw()
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    if let Some(message) = panic.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message.clone()
    } else {
        "unknown".to_owned()
    }
}

/// # Safety
/// `pointer` is NULL or points to a `T` that lives for `'a`.
unsafe fn borrow<'a, T>(pointer: *const T, name: &'static str) -> Result<&'a T> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_ref() }.ok_or(Error::Null(name))
}

/// # Safety
/// `pointer` is NULL or points to memory that a `T` may be written to.
unsafe fn store<T>(pointer: *mut T, name: &'static str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::Null(name));
    }
    // SAFETY: not NULL, and as the caller promises; what was there is not read.
    unsafe { pointer.write(value) };
    Ok(())
}

/// # Safety
/// `bytes` is NULL or points to `length` bytes that live for `'a`.
unsafe fn utf8<'a>(bytes: *const c_char, length: usize, what: &'static str) -> Result<&'a str> {
    if length == 0 {
        return Ok("");
    }
    if bytes.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: not NULL, and as the caller promises.
    let bytes = unsafe { slice::from_raw_parts(bytes.cast::<u8>(), length) };
    str::from_utf8(bytes).map_err(|error| Error::Utf8 { what, at: error.valid_up_to() })
}

/// # Safety
/// `string` is NULL or points to a zero-terminated string that lives for `'a`.
unsafe fn c_str<'a>(string: *const c_char, what: &'static str) -> Result<&'a CStr> {
    if string.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: not NULL, and as the caller promises.
    Ok(unsafe { CStr::from_ptr(string) })
}

fn owned(ids: &[u32]) -> Ids {
    let mut boxed: Box<[u32]> = ids.into();
    let ids = Ids { data: boxed.as_mut_ptr(), length: boxed.len() };
    std::mem::forget(boxed);
    ids
}

/// # Safety
/// `error` came from this library and was not given back yet, or is NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_error_free(error: *mut c_char) {
    if !error.is_null() {
        // SAFETY: `boundary` made it with `into_raw`.
        drop(unsafe { CString::from_raw(error) });
    }
}

/// # Safety
/// `path` is a string and `text` writable, or they are NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_open(path: *const c_char, text: *mut *mut Text) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let path = unsafe { c_str(path, "the path") }?;
        let opened = Box::into_raw(Box::new(Text::open(Path::new(os_str(path)?))?));
        // SAFETY: as the caller promises.
        unsafe { store(text, "text", opened) }.inspect_err(|_| {
            // SAFETY: just made, and nobody else's.
            drop(unsafe { Box::from_raw(opened) });
        })
    })
}

#[cfg(unix)]
fn os_str(path: &CStr) -> Result<&OsStr> {
    use std::os::unix::ffi::OsStrExt;
    Ok(OsStr::from_bytes(path.to_bytes()))
}

#[cfg(not(unix))]
fn os_str(path: &CStr) -> Result<&OsStr> {
    let path =
        path.to_str().map_err(|error| Error::Utf8 { what: "the path", at: error.valid_up_to() })?;
    Ok(OsStr::new(path))
}

/// # Safety
/// `text` came from `etkv_text_open` and was not given back yet, or is NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_free(text: *mut Text) {
    if !text.is_null() {
        // SAFETY: `etkv_text_open` made it with `into_raw`.
        drop(unsafe { Box::from_raw(text) });
    }
}

/// # Safety
/// `ids` is NULL, or was filled by this library, or is empty.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_ids_free(ids: *mut Ids) {
    // SAFETY: as the caller promises.
    let Some(ids) = (unsafe { ids.as_mut() }) else {
        return;
    };
    if !ids.data.is_null() {
        // SAFETY: `owned` made it from a boxed slice of this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(ids.data, ids.length)) });
    }
    ids.data = ptr::null_mut();
    ids.length = 0;
}

/// # Safety
/// `utf8` has `length` bytes; the other pointers are as in the header, or NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_encode(
    text: *const Text,
    utf8: *const c_char,
    length: usize,
    special: bool,
    ids: *mut Ids,
) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let text = unsafe { borrow(text, "text") }?;
        // SAFETY: as the caller promises.
        let utf8 = unsafe { self::utf8(utf8, length, "the text") }?;
        let encoded = text.encode(utf8, special)?;
        // SAFETY: as the caller promises.
        unsafe { store_ids(ids, &encoded) }
    })
}

/// # Safety
/// `ids` is writable or NULL.
unsafe fn store_ids(ids: *mut Ids, values: &[u32]) -> Result<()> {
    if ids.is_null() {
        return Err(Error::Null("ids"));
    }
    // SAFETY: not NULL, and as the caller promises.
    unsafe { store(ids, "ids", owned(values)) }
}

/// # Safety
/// `text` came from `etkv_text_open`, or is NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_has_chat_template(text: *const Text) -> bool {
    // SAFETY: as the caller promises.
    unsafe { text.as_ref() }.is_some_and(Text::has_chat_template)
}

/// # Safety
/// `messages` has `n_messages` messages; the other pointers are as in the
/// header, or NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_encode_chat(
    text: *const Text,
    messages: *const RawMessage,
    n_messages: usize,
    add_generation_prompt: bool,
    ids: *mut Ids,
) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let text = unsafe { borrow(text, "text") }?;
        let raw = match n_messages {
            0 => &[],
            _ if messages.is_null() => return Err(Error::Null("messages")),
            // SAFETY: not NULL, and as the caller promises.
            n => unsafe { slice::from_raw_parts(messages, n) },
        };
        let messages = raw
            .iter()
            // SAFETY: as the caller promises of each message.
            .map(|message| unsafe { read_message(message) })
            .collect::<Result<Vec<_>>>()?;
        let encoded = text.encode_chat(&messages, add_generation_prompt)?;
        // SAFETY: as the caller promises.
        unsafe { store_ids(ids, &encoded) }
    })
}

/// # Safety
/// The message's pointers are as in the header, or NULL.
unsafe fn read_message(message: &RawMessage) -> Result<Message> {
    // SAFETY: as the caller promises.
    let role = unsafe { c_str(message.role, "the role") }?;
    // SAFETY: as the caller promises.
    let content = unsafe { utf8(message.content, message.content_length, "the text") }?;
    let role =
        role.to_str().map_err(|error| Error::Utf8 { what: "the role", at: error.valid_up_to() })?;
    Ok(Message { role: role.to_owned(), content: content.to_owned() })
}

/// # Safety
/// `text` came from `etkv_text_open` and `ids` is writable, or they are NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_eos_token_ids(text: *const Text, ids: *mut Ids) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let text = unsafe { borrow(text, "text") }?;
        // SAFETY: as the caller promises.
        unsafe { store_ids(ids, text.eos_token_ids()) }
    })
}

/// # Safety
/// `text` came from `etkv_text_open`, or is NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_stream_new(text: *const Text) -> *mut Stream {
    // SAFETY: as the caller promises.
    match unsafe { text.as_ref() } {
        Some(text) => Box::into_raw(Box::new(Stream::new(Arc::clone(&text.tokenizer)))),
        None => ptr::null_mut(),
    }
}

/// # Safety
/// `stream` came from `etkv_text_stream_new` and was not given back yet, or is
/// NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_stream_free(stream: *mut Stream) {
    if !stream.is_null() {
        // SAFETY: `etkv_text_stream_new` made it with `into_raw`.
        drop(unsafe { Box::from_raw(stream) });
    }
}

/// # Safety
/// The pointers are as in the header, or NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_stream_next(
    stream: *mut Stream,
    id: u32,
    piece: *mut *const c_char,
    length: *mut usize,
) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let stream = unsafe { stream.as_mut() }.ok_or(Error::Null("stream"))?;
        let next = stream.next(id)?;
        // SAFETY: as the caller promises.
        unsafe { store_piece(piece, length, next) }
    })
}

/// # Safety
/// The pointers are as in the header, or NULL.
#[no_mangle]
pub unsafe extern "C" fn etkv_text_stream_finish(
    stream: *mut Stream,
    piece: *mut *const c_char,
    length: *mut usize,
) -> *mut c_char {
    boundary(|| {
        // SAFETY: as the caller promises.
        let stream = unsafe { stream.as_mut() }.ok_or(Error::Null("stream"))?;
        let rest = stream.finish()?;
        // SAFETY: as the caller promises.
        unsafe { store_piece(piece, length, rest) }
    })
}

/// # Safety
/// `piece` and `length` are writable or NULL.
unsafe fn store_piece(piece: *mut *const c_char, length: *mut usize, text: &str) -> Result<()> {
    if piece.is_null() {
        return Err(Error::Null("piece"));
    }
    // SAFETY: as the caller promises.
    unsafe { store(length, "length", text.len()) }?;
    // SAFETY: as the caller promises.
    unsafe { store(piece, "piece", text.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn take(error: *mut c_char) -> String {
        assert!(!error.is_null());
        // SAFETY: the library made it.
        let sentence = unsafe { CStr::from_ptr(error) }.to_str().unwrap().to_owned();
        // SAFETY: given back once.
        unsafe { etkv_text_error_free(error) };
        sentence
    }

    fn open() -> *mut Text {
        let folder = fixture::folder();
        let path = CString::new(folder.path().to_str().unwrap()).unwrap();
        let mut text = ptr::null_mut();
        // SAFETY: a string and a place to write to.
        assert!(unsafe { etkv_text_open(path.as_ptr(), &mut text) }.is_null());
        text
    }

    #[test]
    fn a_text_there_and_back() {
        let text = open();
        let mut ids = owned(&[]);
        let said = "hi é";
        // SAFETY: every pointer is what the header asks for, and freed once.
        unsafe {
            etkv_text_ids_free(&mut ids);
            assert!(
                etkv_text_encode(text, said.as_ptr().cast(), said.len(), false, &mut ids).is_null()
            );
            let stream = etkv_text_stream_new(text);
            etkv_text_free(text);

            let mut answer = String::new();
            let (mut piece, mut length) = (ptr::null(), 0);
            for &id in slice::from_raw_parts(ids.data, ids.length) {
                assert!(etkv_text_stream_next(stream, id, &mut piece, &mut length).is_null());
                answer += utf8(piece, length, "piece").unwrap();
            }
            assert!(etkv_text_stream_finish(stream, &mut piece, &mut length).is_null());
            assert_eq!(length, 0);
            assert_eq!(answer, said);
            etkv_text_stream_free(stream);
            etkv_text_ids_free(&mut ids);
            etkv_text_ids_free(&mut ids);
        }
        assert_eq!(ids.length, 0);
    }

    #[test]
    fn a_conversation_and_its_end() {
        let text = open();
        let mut ids = owned(&[]);
        let message =
            RawMessage { role: c"user".as_ptr(), content: c"hi".as_ptr(), content_length: 2 };
        // SAFETY: every pointer is what the header asks for, and freed once.
        unsafe {
            assert!(etkv_text_has_chat_template(text));
            assert!(etkv_text_encode_chat(text, &message, 1, true, &mut ids).is_null());
            assert_eq!(*ids.data, fixture::START);
            etkv_text_ids_free(&mut ids);
            assert!(etkv_text_eos_token_ids(text, &mut ids).is_null());
            assert_eq!((*ids.data, ids.length), (fixture::END, 1));
            etkv_text_ids_free(&mut ids);
            etkv_text_free(text);
        }
    }

    #[test]
    fn bad_arguments_are_errors() {
        let text = open();
        let mut ids = Ids { data: ptr::null_mut(), length: 7 };
        // SAFETY: NULL is allowed everywhere, and 2 bytes are 2 bytes.
        unsafe {
            let mut none = ptr::null_mut();
            assert_eq!(take(etkv_text_open(ptr::null(), &mut none)), "the path is NULL");
            assert_eq!(
                take(etkv_text_encode(text, [b'a', 0xff].as_ptr().cast(), 2, false, &mut ids)),
                "the text is not valid UTF-8 from byte 1 on"
            );
            assert_eq!(ids.length, 7);
            assert_eq!(
                take(etkv_text_encode(text, c"a".as_ptr(), 1, false, ptr::null_mut())),
                "ids is NULL"
            );
            assert_eq!(
                take(etkv_text_encode_chat(text, ptr::null(), 1, true, &mut ids)),
                "messages is NULL"
            );
            assert!(etkv_text_stream_new(ptr::null()).is_null());
            etkv_text_stream_free(ptr::null_mut());
            etkv_text_ids_free(ptr::null_mut());
            etkv_text_free(ptr::null_mut());
            etkv_text_error_free(ptr::null_mut());
            etkv_text_free(text);
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(
            take(boundary(|| panic!("oh \0 no"))),
            "a defect in the text library: oh \u{fffd} no"
        );
    }
}
