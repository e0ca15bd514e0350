package api

import (
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/manifests"
)

// codecs are the serializers by media type.
type codecs struct {
	infos []runtime.SerializerInfo // JSON first
}

func newCodecs() codecs {
	f := manifests.Codecs()
	return codecs{infos: f.SupportedMediaTypes()}
}

// Forms in which objects are answered.
type form uint8

const (
	formObject   form = iota // the object itself
	formTable                // as=Table
	formMetadata             // as=PartialObjectMetadata or ...List
)

// answerType is the outcome of content negotiation.
type answerType struct {
	info        runtime.SerializerInfo
	index       int // of info, for cache keys
	contentType string
	form        form
	gv          schema.GroupVersion // of the Table or PartialObjectMetadata
}

type accepted struct {
	typ, sub string
	params   map[string]string
	q        float64
}

func parseAccept(h []string) []accepted {
	var out []accepted
	for _, clause := range strings.Split(strings.Join(h, ","), ",") {
		if strings.TrimSpace(clause) == "" {
			continue
		}
		mt, params, err := mime.ParseMediaType(clause)
		if err != nil {
			continue
		}
		a := accepted{params: params, q: 1}
		a.typ, a.sub, _ = strings.Cut(mt, "/")
		if q, ok := params["q"]; ok {
			if a.q, err = strconv.ParseFloat(q, 64); err != nil {
				continue
			}
		}
		if a.q > 0 {
			out = append(out, a)
		}
	}
	slices.SortStableFunc(out, func(a, b accepted) int {
		switch {
		case a.q > b.q:
			return -1
		case a.q < b.q:
			return 1
		}
		return 0
	})
	return out
}

// Media types of a watch in formats whose frames have a name of their own.
const (
	cborType    = "application/cbor"
	cborSeqType = "application/cbor-seq"
	protoType   = runtime.ContentTypeProtobuf
)

// negotiate picks how a request is answered. transform says whether Table and
// metadata forms exist for what is asked; stream, whether it is a watch.
func (c *codecs) negotiate(r *http.Request, transform, stream bool) (answerType, error) {
	wants := parseAccept(r.Header.Values("Accept"))
	if len(wants) == 0 {
		wants = []accepted{{typ: "*", sub: "*"}}
	}
	for _, a := range wants {
		f, gv, ok := formOf(a.params, transform)
		if !ok {
			continue
		}
		for i := range c.infos {
			info := c.infos[i]
			match := (a.typ == "*" || a.typ == info.MediaTypeType) && (a.sub == "*" || a.sub == info.MediaTypeSubType)
			if stream && info.MediaType == cborType && a.typ+"/"+a.sub == cborSeqType {
				match = true
			}
			if !match || (stream && info.StreamSerializer == nil) {
				continue
			}
			return answerType{info: info, index: i, form: f, gv: gv, contentType: contentTypeOf(info, stream)}, nil
		}
	}
	return answerType{}, c.notAcceptable(stream)
}

func contentTypeOf(info runtime.SerializerInfo, stream bool) string {
	switch {
	case !stream:
		return info.MediaType
	case info.MediaType == protoType:
		return protoType + ";stream=watch"
	case info.MediaType == cborType:
		return cborSeqType
	}
	return info.MediaType
}

func formOf(params map[string]string, transform bool) (form, schema.GroupVersion, bool) {
	as := params["as"]
	if as == "" {
		return formObject, schema.GroupVersion{}, true
	}
	gv := schema.GroupVersion{Group: params["g"], Version: params["v"]}
	if !transform || gv.Group != metav1.GroupName || (gv.Version != "v1" && gv.Version != "v1beta1") {
		return 0, gv, false
	}
	switch as {
	case "Table":
		return formTable, gv, true
	case "PartialObjectMetadata", "PartialObjectMetadataList":
		return formMetadata, gv, true
	}
	return 0, gv, false
}

func (c *codecs) mediaTypes(stream bool) string {
	var out []string
	for _, i := range c.infos {
		if !stream || i.StreamSerializer != nil {
			out = append(out, i.MediaType)
		}
	}
	return strings.Join(out, ", ")
}

func (c *codecs) notAcceptable(stream bool) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable,
		Message: "only the following media types are accepted: " + c.mediaTypes(stream),
	}}
}

func unsupportedMedia(accepted string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnsupportedMediaType, Reason: metav1.StatusReasonUnsupportedMediaType,
		Message: "the body of the request was in an unknown format - accepted media types include: " + accepted,
	}}
}

// input picks the serializer of a request's body; no Content-Type is JSON.
func (c *codecs) input(r *http.Request) (runtime.SerializerInfo, error) {
	ct := r.Header.Get("Content-Type")
	if ct == "" {
		return c.infos[0], nil
	}
	mt, _, err := mime.ParseMediaType(ct)
	if err != nil {
		return runtime.SerializerInfo{}, unsupportedMedia(c.mediaTypes(false))
	}
	for _, i := range c.infos {
		if i.MediaType == mt {
			return i, nil
		}
	}
	return runtime.SerializerInfo{}, unsupportedMedia(c.mediaTypes(false))
}
