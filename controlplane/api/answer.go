package api

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/printers"
	"github.com/dunlin-project/dunlin/manifests"
)

// gzipFrom is the size from which an answer is compressed, bytes: upstream's
// figure. Below it the CPU costs more than the wire.
const gzipFrom = 128 << 10

// write encodes an object as the answer. Objects are shared: they are not
// modified.
func (s *Server) write(rq *request, at answerType, code int, obj runtime.Object) {
	rq.writeWarnings()
	h := rq.w.Header()
	h.Set("Content-Type", at.contentType)
	h.Add("Vary", "Accept")
	out := &lazyGzip{rq: rq, code: code}
	err := at.info.Serializer.Encode(obj, out)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		return
	}
	if rq.w.code == 0 && !out.wrote() {
		s.cfg.Log.Error("api answer cannot be encoded", "path", rq.URL.Path, "err", err)
		st := statusOf(apierrors.NewInternalError(err))
		h.Set("Content-Type", s.codecs.infos[0].MediaType)
		rq.w.WriteHeader(int(st.Code))
		_ = s.codecs.infos[0].Serializer.Encode(&st, rq.w) // the client is gone if this fails
		return
	}
	panic(http.ErrAbortHandler)
}

// lazyGzip holds back the beginning of an answer until it is known whether
// it is worth compressing.
type lazyGzip struct {
	rq   *request
	code int
	buf  bytes.Buffer
	to   io.Writer
	gz   *gzip.Writer
}

func (l *lazyGzip) wrote() bool { return l.to != nil }

func (l *lazyGzip) Write(b []byte) (int, error) {
	if l.to != nil {
		return l.to.Write(b)
	}
	l.buf.Write(b)
	if l.buf.Len() < gzipFrom {
		return len(b), nil
	}
	l.to = l.rq.listed.through(l.rq.w)
	if strings.Contains(l.rq.Header.Get("Accept-Encoding"), "gzip") {
		l.rq.w.Header().Set("Content-Encoding", "gzip")
		l.rq.w.Header().Add("Vary", "Accept-Encoding")
		gz, err := gzip.NewWriterLevel(l.to, gzip.BestSpeed)
		if err != nil {
			return 0, err
		}
		l.gz, l.to = gz, gz
	}
	l.rq.w.WriteHeader(l.code)
	if _, err := l.to.Write(l.buf.Bytes()); err != nil {
		return 0, err
	}
	l.buf = bytes.Buffer{}
	return len(b), nil
}

func (l *lazyGzip) Close() error {
	if l.gz != nil {
		return l.gz.Close()
	}
	if l.to == nil && l.buf.Len() > 0 {
		l.rq.w.Header().Set("Content-Length", strconv.Itoa(l.buf.Len()))
		l.rq.w.WriteHeader(l.code)
		l.to = l.rq.listed.through(l.rq.w)
		_, err := l.to.Write(l.buf.Bytes())
		return err
	}
	return nil
}

// answer transforms one object to the negotiated form and writes it.
func (s *Server) answer(rq *request, at answerType, code int, obj runtime.Object) error {
	obj, err := s.transform(rq, at, obj, false)
	if err != nil {
		return err
	}
	s.write(rq, at, code, obj)
	return nil
}

// transform makes the Table or metadata form of an object or list.
func (s *Server) transform(rq *request, at answerType, obj runtime.Object, noHeaders bool) (runtime.Object, error) {
	switch at.form {
	case formTable:
		o, err := tableOptions(rq.URL.Query())
		if err != nil {
			return nil, err
		}
		return printers.Table(obj, printers.Options{
			Now: s.cfg.Clock.Now(), IncludeObject: o.IncludeObject, NoHeaders: noHeaders || o.NoHeaders, GroupVersion: at.gv,
		})
	case formMetadata:
		return metadataOf(obj, at.gv)
	}
	return obj, nil
}

func tableOptions(q url.Values) (metav1.TableOptions, error) {
	var o metav1.TableOptions
	if err := metav1.Convert_url_Values_To_v1_TableOptions(&q, &o, nil); err != nil {
		return o, apierrors.NewBadRequest(err.Error())
	}
	if errs := metav1validation.ValidateTableOptions(&o); len(errs) > 0 {
		return o, apierrors.NewBadRequest("Unable to convert to Table as requested: " + errs.ToAggregate().Error())
	}
	return o, nil
}

// metadataOf is the PartialObjectMetadata(List) of an object or list.
func metadataOf(obj runtime.Object, gv schema.GroupVersion) (runtime.Object, error) {
	if !meta.IsListType(obj) {
		return partial(obj, gv)
	}
	lm, err := meta.ListAccessor(obj)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	out := &metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: gv.String()},
		ListMeta: metav1.ListMeta{
			ResourceVersion: lm.GetResourceVersion(), Continue: lm.GetContinue(), RemainingItemCount: lm.GetRemainingItemCount(),
		},
		Items: make([]metav1.PartialObjectMetadata, 0, meta.LenList(obj)),
	}
	err = meta.EachListItem(obj, func(o runtime.Object) error {
		p, err := partial(o, gv)
		if err == nil {
			out.Items = append(out.Items, *p)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func partial(obj runtime.Object, gv schema.GroupVersion) (*metav1.PartialObjectMetadata, error) {
	m, ok := obj.(interface{ GetObjectMeta() metav1.Object })
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("%T has no metadata", obj))
	}
	om, ok := m.GetObjectMeta().(*metav1.ObjectMeta)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("%T has no metadata", obj))
	}
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: gv.String()}, ObjectMeta: *om,
	}, nil
}

// listOf makes the kind's list of shared objects. Its items are shallow
// copies without kind and apiVersion, as upstream answers them.
func listOf(k *manifests.Kind, items []runtime.Object, lm metav1.ListMeta) (runtime.Object, error) {
	list := k.NewList()
	v := reflect.ValueOf(list).Elem()
	slice := reflect.MakeSlice(v.FieldByName("Items").Type(), len(items), len(items))
	for i, o := range items {
		e := slice.Index(i)
		e.Set(reflect.ValueOf(o).Elem())
		e.FieldByName("TypeMeta").SetZero()
	}
	v.FieldByName("Items").Set(slice)
	gvk := k.GVK
	gvk.Kind += "List"
	list.GetObjectKind().SetGroupVersionKind(gvk)
	acc, err := meta.ListAccessor(list)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	acc.SetResourceVersion(lm.ResourceVersion)
	acc.SetContinue(lm.Continue)
	acc.SetRemainingItemCount(lm.RemainingItemCount)
	return list, nil
}

// shallow copies the top level of an object, so that fields of its metadata
// can be set without touching the shared original.
func shallow(obj runtime.Object) (runtime.Object, metav1.Object, error) {
	v := reflect.ValueOf(obj).Elem()
	cp := reflect.New(v.Type())
	cp.Elem().Set(v)
	out, ok := cp.Interface().(runtime.Object)
	if !ok {
		return nil, nil, apierrors.NewInternalError(fmt.Errorf("%T has no metadata", obj))
	}
	m, err := meta.Accessor(out)
	if err != nil {
		return nil, nil, apierrors.NewInternalError(err)
	}
	return out, m, nil
}

func formatRV(rv uint64) string { return strconv.FormatUint(rv, 10) }
