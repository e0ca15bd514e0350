package api

import (
	"bytes"
	"container/list"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// encodeObject is the object inside a watch event.
func encodeObject(at answerType, obj runtime.Object) ([]byte, error) {
	var b bytes.Buffer
	if err := at.info.Serializer.Encode(obj, &b); err != nil {
		return nil, err
	}
	if at.info.MediaType == runtime.ContentTypeJSON {
		return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
	}
	return b.Bytes(), nil
}

// appendFrame appends one watch event in the format's framing.
func appendFrame(buf []byte, at answerType, t watch.EventType, object []byte) ([]byte, error) {
	if at.info.MediaType == runtime.ContentTypeJSON {
		buf = append(buf, `{"type":"`...)
		buf = append(buf, t...)
		buf = append(buf, `","object":`...)
		buf = append(buf, object...)
		return append(buf, "}\n"...), nil
	}
	e := &metav1.WatchEvent{Type: string(t), Object: runtime.RawExtension{Raw: object}}
	b := bytes.NewBuffer(buf)
	w := at.info.StreamSerializer.NewFrameWriter(b)
	if err := at.info.StreamSerializer.Encode(e, w); err != nil {
		return buf, err
	}
	return b.Bytes(), nil
}

// encodings is a bounded LRU of encoded objects, so that an event is encoded
// once per format, however many watch.
type encodings struct {
	mu    sync.Mutex
	max   int
	bytes int
	order *list.List // of *encoding
	byKey map[encodingKey]*list.Element
}

type encodingKey struct {
	rec    *state.Record
	rv     uint64
	kind   *manifests.Kind
	format int
	form   form
	gv     schema.GroupVersion
}

type encoding struct {
	key  encodingKey
	data []byte
}

func newEncodings(maxBytes int) *encodings {
	return &encodings{max: maxBytes, order: list.New(), byKey: map[encodingKey]*list.Element{}}
}

func (c *encodings) get(k encodingKey) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byKey[k]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*encoding).data, true
}

func (c *encodings) put(k encodingKey, data []byte) {
	if len(data) > c.max/8 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.byKey[k]; ok {
		return
	}
	c.byKey[k] = c.order.PushFront(&encoding{key: k, data: data})
	c.bytes += len(data)
	for c.bytes > c.max {
		old := c.order.Remove(c.order.Back()).(*encoding)
		delete(c.byKey, old.key)
		c.bytes -= len(old.data)
	}
}
