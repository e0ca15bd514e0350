package discovery

import (
	"cmp"
	"mime"
	"slices"
	"strconv"
	"strings"
)

// wanted is one entry of an Accept header.
type wanted struct {
	media   string // "application/json", "*/*"
	g, v    string
	as      string
	quality float64
}

// parseAccept reads an Accept header, best first. An entry that is not
// understood is skipped.
func parseAccept(header string) []wanted {
	var list []wanted
	for part := range strings.SplitSeq(header, ",") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		media, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		q := 1.0
		if s, ok := params["q"]; ok {
			if q, err = strconv.ParseFloat(s, 64); err != nil || q <= 0 {
				continue
			}
		}
		list = append(list, wanted{media: media, g: params["g"], v: params["v"], as: params["as"], quality: q})
	}
	slices.SortStableFunc(list, func(a, b wanted) int { return cmp.Compare(b.quality, a.quality) })
	return list
}

// choose picks the document's form for an Accept header; an empty one is
// plain JSON.
func choose(d *document, accept string) (answer, bool) {
	if strings.TrimSpace(accept) == "" {
		return d.plain[0], true
	}
	for _, w := range parseAccept(accept) {
		forms := d.plain
		if w.as != "" || w.g != "" {
			if w.as != "APIGroupDiscoveryList" || w.g != "apidiscovery.k8s.io" {
				continue
			}
			switch w.v {
			case "v2":
				forms = d.v2
			case "v2beta1":
				forms = d.beta
			default:
				continue
			}
		}
		for _, a := range forms {
			media, _, _ := strings.Cut(a.contentType, ";")
			if w.media == media || w.media == "*/*" || (w.media == "application/*" && strings.HasPrefix(media, "application/")) {
				return a, true
			}
		}
	}
	return answer{}, false
}
