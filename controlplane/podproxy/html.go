package podproxy

import (
	"errors"
	"io"
	"slices"

	"golang.org/x/net/html"
)

// tokenMost bounds one tag or one text between tags, bytes. From a longer one
// on, a page passes as it is.
const tokenMost = 256 << 10

// htmlChunk is how much is rewritten ahead of a reader, bytes.
const htmlChunk = 8 << 10

// addressed are the attributes that hold addresses, by tag: upstream's list.
var addressed = map[string][]string{
	"a": {"href"}, "applet": {"codebase"}, "area": {"href"}, "audio": {"src"}, "base": {"href"}, "blockquote": {"cite"},
	"body": {"background"}, "button": {"formaction"}, "command": {"icon"}, "del": {"cite"}, "embed": {"src"}, "form": {"action"},
	"frame": {"longdesc", "src"}, "head": {"profile"}, "html": {"manifest"}, "iframe": {"longdesc", "src"},
	"img": {"longdesc", "src", "usemap"}, "input": {"src", "usemap", "formaction"}, "ins": {"cite"}, "link": {"href"},
	"object": {"classid", "codebase", "data", "usemap"}, "q": {"cite"}, "script": {"src"}, "source": {"src"}, "video": {"poster", "src"},
}

// htmlReader rewrites addresses in a page while it is read.
type htmlReader struct {
	z       *html.Tokenizer
	src     io.Reader
	address func(string) string
	out     []byte
	plain   bool // the rest passes as it is
	err     error
}

func newHTML(r io.Reader, address func(string) string) *htmlReader {
	h := &htmlReader{z: html.NewTokenizer(r), src: r, address: address}
	h.z.SetMaxBuf(tokenMost)
	return h
}

// Read implements io.Reader.
func (h *htmlReader) Read(p []byte) (int, error) {
	for len(h.out) == 0 && h.err == nil && !h.plain {
		h.fill()
	}
	if len(h.out) > 0 {
		n := copy(p, h.out)
		h.out = h.out[n:]
		return n, nil
	}
	if h.err != nil {
		return 0, h.err
	}
	return h.src.Read(p)
}

// fill rewrites what has come, and no more than a chunk.
func (h *htmlReader) fill() {
	h.out = h.out[:0]
	for len(h.out) < htmlChunk {
		kind := h.z.Next()
		if kind == html.ErrorToken {
			h.out = append(h.out, h.z.Raw()...)
			if h.err = h.z.Err(); errors.Is(h.err, html.ErrBufferExceeded) {
				h.out = append(h.out, h.z.Buffered()...)
				h.err, h.plain = nil, true
			}
			return
		}
		h.token(kind)
		if len(h.z.Buffered()) == 0 {
			return // the next may take long to come
		}
	}
}

// token writes one, as it came where nothing is to be changed.
func (h *htmlReader) token(kind html.TokenType) {
	start := len(h.out)
	h.out = append(h.out, h.z.Raw()...)
	if kind != html.StartTagToken && kind != html.SelfClosingTagToken {
		return
	}
	t := h.z.Token()
	changed := false
	for i, a := range t.Attr {
		if !slices.Contains(addressed[t.Data], a.Key) {
			continue
		}
		if to := h.address(a.Val); to != a.Val {
			t.Attr[i].Val, changed = to, true
		}
	}
	if changed {
		h.out = append(h.out[:start], t.String()...)
	}
}
